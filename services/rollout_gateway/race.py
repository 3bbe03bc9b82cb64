"""Several things at once, until one of them decides."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def race(*contenders: Coroutine[Any, Any, T | None]) -> T:
    """Run coroutines together; the first result that is not None wins, an error wins too, and the rest is cancelled.

    At least one must decide.
    """
    tasks = [asyncio.ensure_future(contender) for contender in contenders]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (result := task.result()) is not None:
                    return result
        raise AssertionError("nobody decided")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
