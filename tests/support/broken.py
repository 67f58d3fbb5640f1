"""`headrace worker` with a fault of its own: what its attempts come to cannot be told."""

from __future__ import annotations

from typing import NoReturn

from tests.support import altered


def _break() -> None:
    from workers.worker import Worker

    def finish(*_: object) -> NoReturn:
        raise RuntimeError("broken on purpose")

    Worker._finish = finish  # type: ignore[assignment, method-assign]
    Worker._failed = finish  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    raise SystemExit(altered.run(__spec__.name, _break))
