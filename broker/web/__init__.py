"""The management API over HTTP. `app.make_app` builds it, `headrace serve` runs it; it needs the extra `api`."""
