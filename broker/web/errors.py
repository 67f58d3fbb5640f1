"""Errors as HTTP answers: `{"error": {"code", "message"}}`, the message one line. A table, by the error tree."""

from __future__ import annotations

from typing import Final

from broker.errors import (
    BrokerError,
    BrokerUnavailable,
    BrokerUnsuitable,
    ConfigError,
    HeadraceError,
    InvalidTask,
    QueueFull,
    TaskError,
    UnknownTask,
    UsageError,
)

MOST_MESSAGE: Final = 1000  # characters

# The first that fits. Redis being away is not the caller's fault and passes: 503.
STATUS: Final[tuple[tuple[type[HeadraceError], int, str], ...]] = (
    (UnknownTask, 404, "unknown_task"),
    (InvalidTask, 400, "invalid"),
    (ConfigError, 400, "invalid"),
    (UsageError, 409, "refused"),
    (TaskError, 409, "refused"),
    (BrokerUnavailable, 503, "redis_unavailable"),
    (BrokerUnsuitable, 503, "redis_unsuitable"),
    (QueueFull, 503, "redis_full"),
    (BrokerError, 503, "redis_error"),
    (HeadraceError, 500, "internal"),
)


class ApiError(HeadraceError):
    """An answer that is an error: HTTP status, a code for programs, a line for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def invalid(message: str) -> ApiError:
    return ApiError(400, "invalid", message)


def status_of(error: HeadraceError) -> tuple[int, str]:
    """HTTP status and code."""
    if isinstance(error, ApiError):
        return error.status, error.code
    return next((status, code) for kind, status, code in STATUS if isinstance(error, kind))


def error_body(code: str, message: str) -> dict[str, dict[str, str]]:
    return {"error": {"code": code, "message": "; ".join(message.splitlines())[:MOST_MESSAGE]}}
