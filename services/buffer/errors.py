"""From what Redis says to the errors of `services.common.errors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from services.common.errors import Aborted, AlreadyExists, FailedPrecondition, FlotillaError, NotFound, Unavailable

FULL = "Redis is full: raise its maxmemory, or commit more often"


class RedisFull(Unavailable):
    """Redis has reached its maxmemory; what needs no more memory still works."""


_BY_WORD: dict[str, type[FlotillaError]] = {
    "ABORTED": Aborted,
    "ALREADY_EXISTS": AlreadyExists,
    "FAILED_PRECONDITION": FailedPrecondition,
    "NOT_FOUND": NotFound,
}


@contextmanager
def redis_errors() -> Iterator[None]:
    """Inside the block, a refusal by a script becomes its domain error, and a Redis that is away Unavailable."""
    try:
        yield
    except (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError, OSError) as error:
        raise Unavailable(f"Redis is away: {error}") from error
    except exceptions.OutOfMemoryError as error:
        raise RedisFull(FULL) from error
    except exceptions.ResponseError as error:
        if "OOM command not allowed" in str(error):  # Redis 6.2 wraps what it refuses inside a script
            raise RedisFull(FULL) from error
        if "MISCONF" in str(error) or str(error).startswith("BUSY"):
            raise Unavailable(f"Redis refuses writes: {error}") from error
        if "NOPERM" in str(error) or isinstance(error, exceptions.NoPermissionError):
            raise FailedPrecondition(f"the Redis user lacks a permission: {error}") from error
        word, _, text = str(error).partition(" ")
        if word not in _BY_WORD:
            raise
        raise _BY_WORD[word](text) from None
