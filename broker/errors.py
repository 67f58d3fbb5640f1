"""The error tree, drawn by whose fault it is. Everything headrace raises on purpose derives from HeadraceError.

HeadraceError
├── TaskError                  the task's fault; trying again changes nothing
│   ├── InvalidTask            refused before it was queued (also a ValueError)
│   │   └── PayloadTooLarge
│   ├── IdempotencyConflict    same key or id, another payload
│   ├── UnknownTask            no task of this id (never was, or its outcome has expired)
│   └── TaskFailed             the task has an outcome that is no success
│       ├── DeadLettered       given up; it waits in the dead letters
│       │   └── Poisoned       it ended its process, again and again
│       ├── Expired            its deadline passed
│       └── Canceled
├── EndpointError              the endpoint's fault, or its answer to one attempt (see workers.retry for the table)
├── BrokerError                Redis, or the state in it
│   ├── BrokerUnavailable      cannot be reached
│   ├── BrokerUnsuitable       reached, but must not be used (evicts, too old, wrong settings)
│   ├── QueueFull              the pool's depth limit, or Redis' memory limit
│   └── EmbeddedServerError    the bundled server did not start
├── ConfigError                the configuration; carries every problem found, with file, line and key
├── ResultTimeout              result() waited as long as it was told to (also a TimeoutError)
└── UsageError                 the command line's words
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any


class HeadraceError(Exception):
    """Root of the tree. `str()` is one line: what, where, what to do.

    `exit_code` is what the command line ends with: 1 some tasks failed, 2 usage, 3 config, 4 Redis.
    """

    exit_code = 1


class TaskError(HeadraceError):
    """The task's fault; trying again changes nothing."""


class InvalidTask(TaskError, ValueError):
    """Refused before it was queued: the message names the field, its value and what is allowed."""

    exit_code = 2


class PayloadTooLarge(InvalidTask):
    """The encoded task is larger than the pool's payload limit (256 KiB by default)."""


class IdempotencyConflict(TaskError):
    """The idempotency key or task id stands for a task with another payload. `task_id` is the earlier one."""

    def __init__(self, message: str, task_id: str = "") -> None:
        super().__init__(message)
        self.task_id = task_id


class UnknownTask(TaskError):
    """No task of this id: it never was, or its outcome has expired."""


class TaskFailed(TaskError):
    """The task has an outcome that is no success.

    `task_id`; `reason`, one line; `status_code` and `body` of the last answer (None, b"" if there was none).
    """

    outcome = "dead"

    def __init__(self, task_id: str, reason: str, status_code: int | None = None, body: bytes = b"") -> None:
        said = reason if reason.startswith(f"{self.outcome}:") else f"{self.outcome}: {reason}"
        super().__init__(f"task {task_id}: {said}")
        self.task_id, self.reason, self.status_code, self.body = task_id, reason, status_code, body


class DeadLettered(TaskFailed):
    """Given up; it waits in the dead letters (`headrace dead show ID`)."""


class Poisoned(DeadLettered):
    """Delivered five times and no process lived to settle it."""

    outcome = "poison"


class Expired(TaskFailed):
    """Its deadline passed before an answer came."""

    outcome = "expired"


class Canceled(TaskFailed):
    """Somebody canceled it."""

    outcome = "canceled"


class EndpointError(HeadraceError):
    """One attempt failed at an endpoint; see `workers.errors` for the kinds."""


class BrokerError(HeadraceError):
    """Redis, or the state in it. `passing`: the whole server says it, and may answer otherwise a moment later."""

    exit_code = 4
    passing = False


class BrokerUnavailable(BrokerError):
    """Redis cannot be reached."""

    passing = True


class BrokerUnsuitable(BrokerError):
    """Redis is reached but must not be used; the message names the setting and the remedy."""


class QueueFull(BrokerError):
    """The pool holds `max_depth` tasks, or Redis is at its memory limit. Try later.

    `queued`: the first tasks of the call, which fitted and are queued all the same.
    """

    exit_code = 1

    def __init__(self, message: str, queued: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.queued: tuple[Any, ...] = tuple(queued)


class EmbeddedServerError(BrokerError):
    """The bundled server did not start or could not be found."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration: where (file, 1-based line or None, dotted key) and what to do."""

    file: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.key}: {self.message}" if self.key else f"{where}: {self.message}"


class ConfigError(HeadraceError):
    """Every problem found, reported together. `problems` has them in file order."""

    exit_code = 3

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class ResultTimeout(HeadraceError, TimeoutError):
    """result() waited as long as it was told to; the task goes on."""


class UsageError(HeadraceError):
    """The command line's words."""

    exit_code = 2


def unforeseen(error: BaseException) -> str:
    """An exception that nobody thought of, on one line: its type, and where in headrace it came from.

    Not its text: Python's own often repeats the value that was wrong, which may be a password. What the system says
    of a failed call (OSError) is its own words.
    """
    root = Path(__file__).resolve().parent.parent
    found = ((Path(frame.filename).resolve(), frame.lineno) for frame in extract_tb(error.__traceback__))
    own = [root / "broker", root / "workers"]
    ours = [f"{path.relative_to(root)}:{line}" for path, line in found if any(path.is_relative_to(o) for o in own)]
    said = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
    place = f" at {ours[-1]}" if ours else ""
    return f"{type(error).__name__}{said}{place}; this is a fault of headrace"
