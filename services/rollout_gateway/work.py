"""Takes work from the buffer and sees each lease to its end.

    LeaseWork ──► one task a lease: { generate │ submit what is finished │ renew }
                       ├──► COMPLETE  the last submit ended the lease
                       ├──► STOPPED   submit what is finished, ReleaseLease
                       ├──► FAILED    submit what is finished, ReleaseLease with the error
                       └──► LOST      drop everything

The buffer may be away for a while: calls are repeated unchanged, and generation goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.common.board import StatusBoard
from services.common.errors import Aborted, DeadlineExceeded, FlotillaError, NotFound, Unavailable
from services.common.logs import get_logger
from services.common.rpc import call, duration, new_request_id, seconds
from services.common.service import Backoff, now_s
from services.common.spec import RunSpec
from services.rollout_gateway.codec import group_from, sample_to
from services.rollout_gateway.generator import Generator
from services.rollout_gateway.group import Group, SampleProgress
from services.rollout_gateway.pool import EnginePool
from services.rollout_gateway.race import race

POLL_S = 10.0
"""How long LeaseWork may wait at the buffer."""
CALL_TIMEOUT_S = 15.0
PATIENCE_S = 600.0
"""How long a call is repeated while the buffer is away; a run survives a restart of its Redis."""
COALESCE_S = 0.5
"""Finished samples wait at most this long for others of their group: grading needs the whole group anyway."""
GATHER_S = 0.05
"""Room that opens is gathered this long before work is asked for, so that engines admit prompts in fewer, larger steps:
one that does runs without CUDA graphs, however few prompts it admits."""
RENEWALS_PER_TTL = 3
STOP_S = 4.0
"""Time to hand in what is finished and to release leases at the end."""

GROUPS = Gauge("flotilla_gateway_running_groups", "Groups under lease here")
LEASED = Counter("flotilla_gateway_leases", "Leases taken since start")
LOST = Counter("flotilla_gateway_lost_leases", "Leases lost since start")

log = get_logger(__name__)
R = TypeVar("R")


class Outcome(Enum):
    """How the work on a lease ended."""

    COMPLETE = "complete"
    STOPPED = "stopped"
    LOST = "lost"
    FAILED = "failed"


@dataclass(slots=True)
class Held:
    """A lease in our hands."""

    group: Group
    token: bytes
    ttl_s: float
    ready: list[SampleProgress] = field(default_factory=list)
    """Finished samples that have not been handed in."""
    some_ready: asyncio.Event = field(default_factory=asyncio.Event)
    all_ready: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end the work early."""

    def add_finished(self, samples: list[SampleProgress]) -> None:
        """Note samples to hand in."""
        self.ready += samples
        self.some_ready.set()
        if not self.group.unfinished():
            self.all_ready.set()


class WorkLoop:
    """The gateway's side of the buffer's leases."""

    def __init__(
        self,
        spec: RunSpec,
        work: buffer_pb2_grpc.BufferServiceAsyncStub,
        runs: registry_pb2_grpc.RunRegistryServiceAsyncStub,
        pool: EnginePool,
        generator: Generator,
        board: StatusBoard,
    ) -> None:
        self._spec = spec
        self._work = work
        self._runs = runs
        self._pool = pool
        self._generator = generator
        self._board = board
        self._worker_id = f"{socket.gethostname()}-{new_request_id()[:8]}"
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
            held.stop.set()
        return len(found)

    async def run(self) -> None:
        """Take work until cancelled; then release what is held.

        Raises:
            FailedPrecondition: The buffer has another run spec under this run_id.
        """
        try:
            await self._register()
            while True:
                max_groups = await self._room()
                for lease in await self._lease(max_groups):
                    self._start(lease)
        finally:
            await self._stop_all()

    async def _register(self) -> None:
        request = registry_pb2.RegisterRunRequest(
            run_id=self._spec.run_id, request_id=new_request_id(), spec_digest=self._spec.digest()
        )
        with self._board.waiting("the buffer, to register the run"):
            await self._insist(self._runs.RegisterRun, request)

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

    async def _lease(self, max_groups: int) -> list[buffer_pb2.WorkLease]:
        request = buffer_pb2.LeaseWorkRequest(
            run_id=self._spec.run_id,
            request_id=new_request_id(),
            worker_id=self._worker_id,
            max_groups=max_groups,
            wait_timeout=duration(POLL_S),
        )
        with self._board.waiting("work from the buffer"):
            return list((await self._insist(self._work.LeaseWork, request)).leases)

    def _start(self, lease: buffer_pb2.WorkLease) -> None:
        held = Held(group_from(lease), lease.lease_token, seconds(lease.ttl))
        task = asyncio.create_task(self._see_through(held), name=f"lease {lease.group_id}")
        self._held[task] = held
        LEASED.inc()
        GROUPS.set(len(self._held))
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._held[task]
        self._pool.notify()
        GROUPS.set(len(self._held))
        if not task.cancelled() and (error := task.exception()):
            log.error("work on a lease failed with a bug", task=task.get_name(), exc_info=error)

    async def _see_through(self, held: Held) -> None:
        error = ""
        try:
            outcome = await race(
                self._generate(held), self._submit_all(held), self._renew(held), _stopped_by_hand(held)
            )
        except (Aborted, NotFound, Unavailable, DeadlineExceeded) as lost:
            outcome, error = Outcome.LOST, str(lost)
        except FlotillaError as failure:
            outcome, error = Outcome.FAILED, str(failure)
        if outcome is not Outcome.COMPLETE:
            log.info("work ended early", group=held.group.group_id, outcome=outcome.value, error=error)
        if outcome is Outcome.LOST:
            self.lost_leases += 1
            LOST.inc()
        elif outcome is not Outcome.COMPLETE:
            await self._hand_back(held, error)

    async def _generate(self, held: Held) -> None:
        await self._generator.generate(held.group, held.add_finished)

    async def _submit_all(self, held: Held) -> Outcome:
        while not held.all_ready.is_set() or held.ready:
            await held.some_ready.wait()
            await _within(COALESCE_S, held.all_ready)
            await self._submit(held)
        return Outcome.COMPLETE

    async def _submit(self, held: Held) -> None:
        """Hand in what is finished; it stays `ready` until the buffer has it."""
        samples = list(held.ready)
        held.some_ready.clear()
        request = buffer_pb2.SubmitSamplesRequest(
            run_id=self._spec.run_id,
            request_id=new_request_id(),
            lease_token=held.token,
            group_id=held.group.group_id,
            samples=[sample_to(held.group, sample) for sample in samples],
        )
        await self._insist(self._work.SubmitSamples, request)
        del held.ready[: len(samples)]

    async def _renew(self, held: Held) -> Outcome:
        while True:
            await asyncio.sleep(held.ttl_s / RENEWALS_PER_TTL)
            request = buffer_pb2.RenewLeaseRequest(
                run_id=self._spec.run_id,
                request_id=new_request_id(),
                lease_token=held.token,
                group_id=held.group.group_id,
            )
            response = await self._insist(self._work.RenewLease, request)
            held.ttl_s = seconds(response.ttl)
            if response.stop_reason:
                return Outcome.STOPPED

    async def _hand_back(self, held: Held, error: str) -> None:
        request = buffer_pb2.ReleaseLeaseRequest(
            run_id=self._spec.run_id,
            request_id=new_request_id(),
            lease_token=held.token,
            group_id=held.group.group_id,
            error=error,
        )
        try:
            if held.ready:
                await self._submit(held)
            if held.group.unfinished():
                await self._insist(self._work.ReleaseLease, request)
        except FlotillaError as failure:
            log.warning("a lease could not be released; it will expire", group=held.group.group_id, error=str(failure))

    async def _stop_all(self) -> None:
        self.abort(())
        if self._held:
            _, late = await asyncio.wait(self._held, timeout=STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _insist(self, method: Callable[..., Awaitable[R]], request: Any) -> R:
        """Repeat a call unchanged while the buffer is away or slow. Raises the last error after PATIENCE_S."""
        give_up = now_s() + PATIENCE_S
        backoff = Backoff()
        while True:
            try:
                return await call(method, request, timeout_s=CALL_TIMEOUT_S)
            except (Unavailable, DeadlineExceeded):
                if now_s() > give_up:
                    raise
            await backoff.wait()


async def _stopped_by_hand(held: Held) -> Outcome:
    await held.stop.wait()
    return Outcome.STOPPED


async def _within(timeout_s: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
