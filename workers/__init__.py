"""headrace, the endpoint side: processes that claim tasks for endpoints, run them over HTTP and settle them."""
