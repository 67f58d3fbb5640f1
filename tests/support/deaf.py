"""`headrace worker` whose idle processes never look by themselves: what they claim, something told them of.

Their idle poll is stretched to an hour.
"""

from __future__ import annotations

from tests.support import altered


def _deafen() -> None:
    from workers import dispatch

    dispatch.POLL_S = (3600.0, 3600.0)  # type: ignore[misc]


if __name__ == "__main__":
    raise SystemExit(altered.run(__spec__.name, _deafen))
