"""The other queues, one module each, in the fast set-up that their documentation describes.

Each is measured if its libraries are installed, in this environment or in one of its own: `python -m bench.peers` makes
`bench/.venv-peers/NAME` for every name in requirements.txt (or for those given), since they ask for different redis-py.
"""

PEERS = ("rq", "rq-pool", "celery", "dramatiq", "huey", "arq", "saq", "taskiq", "repid", "streaq")
VARIANTS = ("rq-pool",)  # another way to run a peer: only its drain is measured
