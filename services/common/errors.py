"""Errors that cross a service boundary, and the status code that each becomes.

A servicer raises one of these; the server interceptor turns it into the status, a client call turns the status back
into the same class. Each also inherits the standard-library type that fits, so that pure code can raise it too.
"""

from __future__ import annotations

import grpc


class FlotillaError(Exception):
    """Base of every error that a caller may handle."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL


class InvalidArgument(FlotillaError, ValueError):
    """The request is malformed; `field` names what is wrong."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class NotFound(FlotillaError, LookupError):
    """Unknown run, group, batch or version."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(FlotillaError, ValueError):
    """Other content under a known id."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Aborted(FlotillaError, RuntimeError):
    """The lease is lost or the epoch is old: redo the whole lease, or stop."""

    code = grpc.StatusCode.ABORTED


class FailedPrecondition(FlotillaError, RuntimeError):
    """Cannot work even if repeated: wrong state, wrong spec digest."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(FlotillaError, RuntimeError):
    """Full; try again after `retry_after_s`."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(FlotillaError, ConnectionError):
    """Starting, draining, or a dependency is away; try again after `retry_after_s`."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float = 0.5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(FlotillaError, TimeoutError):
    """No answer in time; whether the call had an effect is unknown."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


BY_CODE: dict[grpc.StatusCode, type[FlotillaError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        Aborted,
        FailedPrecondition,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
    )
}
