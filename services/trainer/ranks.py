"""What ranks tell one another, in small Python objects. All ranks must make each of these calls together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from services.common.errors import FailedPrecondition

T = TypeVar("T")


def all_ranks(mine: T) -> list[T]:
    """What every rank has, in order of ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def on_first_rank(function: Callable[[], T]) -> T:
    """Call on rank 0; every rank returns what it returned. Its OSError is a FailedPrecondition on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except OSError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise FailedPrecondition(outcome[1])
    return outcome[0]
