"""headrace against other queues and against the bare client, measured in one run: `python -m bench --help`."""
