"""What the buffer does by itself, besides grading and sealing: take back what lapsed, and let go of what nobody needs.

    expire_loop ──► lapsed leases back to WAITING or PARTIAL, late evaluations to FAILED, what is too old to STALE
    grading.py  ──► GENERATED ─ RewardService.Grade ─► SCORED ─ filter ─► KEPT or DROPPED
    sealing.py  ──► rollout_batch_size KEPT groups ─► a READY batch

Each loop starts from what the ledger says, so a restart loses nothing; each wait ends at the next pulse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.buffer.run import RECHECK_S, Pulse, Run
from services.common.board import StatusBoard
from services.common.errors import Unavailable
from services.common.logs import get_logger
from services.common.service import Backoff

EXPIRE_EVERY_S = 0.5
"""With the lease's time to live, bounds how long a dead gateway's work stays away."""

log = get_logger(__name__)


async def repeat(pulse: Pulse, board: StatusBoard, name: str, step: Callable[[], Awaitable[None]]) -> None:
    """Take a step at every beat, for ever; while Redis or a service is away, wait for it."""
    backoff = Backoff()
    while True:
        seen = pulse.beats
        try:
            await step()
            backoff.reset()
        except Unavailable as error:
            log.warning("waiting", loop=name, error=str(error))
            with board.waiting(f"{name}: {error}"):
                await backoff.wait()
        await pulse.wait(seen, RECHECK_S)


async def expire_loop(run: Run) -> None:
    """Take back what lapsed, for ever."""
    while True:
        try:
            moved, gone = await run.ledger.expire(run.memory.wants_commit)
        except Unavailable as error:
            log.warning("waiting", loop="expire", error=str(error))
            moved = gone = 0
        if moved:
            run.turn()
        if not gone:  # else there may be more
            await asyncio.sleep(EXPIRE_EVERY_S)
