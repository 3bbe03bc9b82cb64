"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str, *, stays: bool = False) -> tuple[asyncio.Future[T], threading.Thread]:
    """Run blocking work in a daemon thread, which does not keep the process alive as a pool's thread would.

    Args:
        work: What to run.
        name: Of the thread.
        stays: Whether the thread lives on afterwards; processes that it has started may die with it
            (services.common.parent_death).
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except Exception as error:  # noqa: BLE001  carried over to whoever awaits the future
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, failure)
        if stays:
            threading.Event().wait()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return result, thread
