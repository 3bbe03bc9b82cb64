"""Hears from the buffer, at once, which leases must stop. Renewals say the same later: nothing depends on it.

A stream that breaks is opened again with back-off, and one that has reached its deadline at once; it begins with
everything that must stop, so what was said meanwhile is heard then.
"""

from __future__ import annotations

from collections.abc import Callable

from flotilla.buffer.v1 import buffer_pb2
from services.common.board import StatusBoard
from services.common.errors import DeadlineExceeded, FlotillaError
from services.common.logs import get_logger
from services.common.service import Backoff
from services.rollout_gateway.buffer_client import BufferClient

log = get_logger(__name__)


async def watch_stops(client: BufferClient, on_stop: Callable[[buffer_pb2.Stop], None], board: StatusBoard) -> None:
    """Call `on_stop` for each lease that must stop, until cancelled; it may hear of one several times."""
    backoff = Backoff()
    while True:
        try:
            with board.waiting("word from the buffer of leases that must stop"):
                async for stop in client.watch():
                    backoff.reset()
                    on_stop(stop)
        except DeadlineExceeded:
            backoff.reset()
            continue
        except FlotillaError as error:
            log.info("the watch for stops broke", error=str(error))
        await backoff.wait()
