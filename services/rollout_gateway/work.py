"""Takes work from the buffer, as much as the engines have room for, and gives it back at the end.

LeaseWork ──► one task a lease (lease.py)
WatchWork ──► stops the task of a lease (stops.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Collection

import grpc
from prometheus_client import Counter, Gauge

from flotilla.buffer.v1 import buffer_pb2
from services.common.board import StatusBoard
from services.common.logs import get_logger
from services.common.rpc import new_request_id
from services.common.spec import RunSpec
from services.rollout_gateway.buffer_client import BufferClient
from services.rollout_gateway.generator import Generator
from services.rollout_gateway.lease import Held, LeaseWork, Outcome
from services.rollout_gateway.pool import EnginePool
from services.rollout_gateway.race import race
from services.rollout_gateway.stops import watch_stops

GATHER_S = 0.1
"""Room that opens is gathered this long before work is asked for, so that engines admit prompts in fewer, larger steps:
one that does takes longer, however few prompts it admits."""
ANSWER_TOKENS = 4 << 20
"""Tokens that leases of one call may bring along, at most eight bytes each: half of what a message may hold."""
STOP_S = 4.0
"""Time to hand in what there is and to release leases at the end."""

GROUPS = Gauge("flotilla_gateway_running_groups", "Groups under lease here")
LEASED = Counter("flotilla_gateway_leases", "Leases taken since start")
LOST = Counter("flotilla_gateway_lost_leases", "Leases lost since start")

log = get_logger(__name__)


def most_groups(spec: RunSpec) -> int:
    """Groups to ask for at once, so that the answer fits even if every sample of them is interrupted near its end."""
    longest = max(
        kind.n_samples_per_prompt * (spec.data.max_prompt_tokens + kind.max_response_tokens)
        for kind in (spec.rollout, spec.evaluation)
    )
    return max(1, ANSWER_TOKENS // longest)


class WorkLoop:
    """The gateway's side of the buffer's leases."""

    def __init__(
        self, spec: RunSpec, buffer: grpc.aio.Channel, pool: EnginePool, generator: Generator, board: StatusBoard
    ) -> None:
        """Args:
        spec: The run.
        buffer: Channel to the buffer.
        pool: The engines, for the room that they have.
        generator: What runs on them.
        board: Where waits are shown.
        """
        self._spec = spec
        self._client = BufferClient(spec.run_id, f"{socket.gethostname()}-{new_request_id()[:8]}", buffer)
        self._lease_work = LeaseWork(self._client, generator)
        self._pool = pool
        self._board = board
        self._held: dict[asyncio.Task[None], Held] = {}
        self.paused = False
        self.lost_leases = 0

    @property
    def running_groups(self) -> int:
        """Groups under lease."""
        return len(self._held)

    def set_paused(self, paused: bool) -> None:
        """Take no more work, or take it again."""
        self.paused = paused
        self._pool.notify()

    def abort(self, group_ids: Collection[str]) -> int:
        """Stop groups, all if none is named, and release their leases; returns how many there were."""
        found = [held for held in self._held.values() if not group_ids or held.group.group_id in group_ids]
        for held in found:
            held.end_early("asked for by hand, or at the end of the process")
        return len(found)

    async def run(self) -> None:
        """Take work until cancelled; then release what is held, within STOP_S, however often it is cancelled.

        Raises:
            FailedPrecondition: The buffer has another run spec under this run_id.
        """
        try:
            with self._board.waiting("the buffer, to register the run"):
                await self._client.register(self._spec.digest())
            await race(self._take_work(), watch_stops(self._client, self._stop, self._board))
        finally:
            ending = asyncio.ensure_future(self._stop_all())
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)

    async def _take_work(self) -> None:
        while True:
            max_groups = min(await self._room(), most_groups(self._spec))
            with self._board.waiting("work from the buffer"):
                leases = await self._client.lease_work(max_groups)
            for lease in leases:
                self._start(lease)

    async def _room(self) -> int:
        """How many groups there is room for; waits until there is some, and a moment longer for more."""
        with self._board.waiting("room for more groups on engines that serve"):
            while True:
                while not self._has_room():
                    await self._pool.change()
                await asyncio.sleep(GATHER_S)
                if self._has_room():
                    return max(1, self._free_samples() // self._spec.rollout.n_samples_per_prompt)

    def _has_room(self) -> bool:
        return not self.paused and self._free_samples() > 0

    def _free_samples(self) -> int:
        return self._pool.capacity() - sum(len(held.group.unfinished()) for held in self._held.values())

    def _start(self, lease: buffer_pb2.WorkLease) -> None:
        held = Held.of(lease)
        task = asyncio.create_task(self._see_through(held), name=f"lease {lease.group_id}")
        self._held[task] = held
        LEASED.inc()
        GROUPS.set(len(self._held))
        task.add_done_callback(self._ended)

    async def _see_through(self, held: Held) -> None:
        if await self._lease_work.see_through(held) is Outcome.LOST:
            self.lost_leases += 1
            LOST.inc()

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._held[task]
        self._pool.notify()
        GROUPS.set(len(self._held))
        if not task.cancelled() and (error := task.exception()):
            log.error("work on a lease failed with a bug", task=task.get_name(), exc_info=error)

    def _stop(self, stop: buffer_pb2.Stop) -> None:
        for held in self._held.values():
            if (held.group.group_id, held.token) == (stop.group_id, stop.lease_token):
                held.end_early(buffer_pb2.StopReason.Name(stop.reason))

    async def _stop_all(self) -> None:
        self.abort(())
        if self._held:
            _, late = await asyncio.wait(self._held, timeout=STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
