"""rq: its worker pool, of two SimpleWorkers."""

from __future__ import annotations

from bench import job as jobs
from bench import system
from bench.peers import rq


class System(rq.System):
    setup = "rq worker-pool -n 2 -w rq.worker.SimpleWorker, http.client, not pinned"
    share = 0.1
    processes = 2

    def worker(self) -> list[str]:
        return [
            system.script("rq"), "worker-pool", "--num-workers", str(self.processes),
            "--worker-class", "rq.worker.SimpleWorker", "--quiet", "--url", jobs.redis_url(), rq.NAME,
        ]  # fmt: skip
