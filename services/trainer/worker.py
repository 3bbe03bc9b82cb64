"""The one thread of a rank that touches torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from services.common.logs import get_logger

CLOSE_S = 12.0
"""Less than a supervisor's patience."""

P = ParamSpec("P")
R = TypeVar("R")
log = get_logger(__name__)


class Worker:
    """Runs one thing after the other."""

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(1, "torch", initializer=partial(_use_threads, num_threads))

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run there, after what was given to it before."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args, **kwargs))

    async def close(self, last: Callable[[], None]) -> None:
        """Wait for what it does now, do one last thing, and end.

        Where it waits for ranks that are gone, nothing can interrupt it: then the whole process ends.
        """
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.run(last)
        except TimeoutError:
            log.error("the thread of torch did not end in time; ending the process")
            os._exit(1)
        self._executor.shutdown()


def _use_threads(count: int) -> None:
    if count:
        torch.set_num_threads(count)
