"""What ranks tell one another, in small Python objects. All ranks must make each of these calls together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from services.common.errors import FailedPrecondition, FlotillaError
from services.common.lock import hold
from services.common.spec import SpecError

T = TypeVar("T")


def all_ranks(mine: T) -> list[T]:
    """What every rank has, in order of ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def together(function: Callable[[], T]) -> list[T]:
    """Call on every rank; every rank returns what all returned.

    Raises:
        FailedPrecondition: On every rank, if it failed on one with a FlotillaError, SpecError or OSError.
    """
    outcome: tuple[Any, str] = None, ""
    try:
        outcome = function(), ""
    except (FlotillaError, SpecError, OSError) as error:
        outcome = None, str(error) or repr(error)
    everyone = all_ranks(outcome)
    if failures := {failure for _, failure in everyone if failure}:
        raise FailedPrecondition("; ".join(sorted(failures)))
    return [found for found, _ in everyone]


def on_first_rank(function: Callable[[], T]) -> T:
    """Call on rank 0; every rank returns what that returned. Raises as `together` does."""
    return together(function if dist.get_rank() == 0 else lambda: None)[0]  # pyright: ignore[reportReturnType]


@contextmanager
def held(path: Path, advice: str, what: Path | None = None) -> Iterator[None]:
    """Have rank 0 hold a lock file, whose directory is made, while the block runs; as services.common.lock.hold."""
    with ExitStack() as locks:

        def take() -> None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                locks.enter_context(hold(path, advice, what))
            except OSError as error:
                raise FailedPrecondition(f"{path} cannot be written: {error.strerror}") from None

        on_first_rank(take)
        yield
