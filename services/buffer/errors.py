"""From what Redis says to the errors of `services.common.errors`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from services.common.errors import Aborted, AlreadyExists, FailedPrecondition, FlotillaError, NotFound, Unavailable

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
        raise Unavailable("Redis is full (maxmemory): raise redis.maxmemory_mb or commit more often") from error
    except exceptions.ResponseError as error:
        word, _, text = str(error).partition(" ")
        if word not in _BY_WORD:
            raise
        raise _BY_WORD[word](text) from None
