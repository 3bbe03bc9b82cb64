"""One lease, from the day it is taken to its end.

    { generate │ submit what is finished │ renew, and save what has come }
           ├──► COMPLETE  the last submit ended the lease
           ├──► STOPPED   end it at the engine, submit what is finished, ReleaseLease with the tokens of the rest
           ├──► FAILED    submit what is finished, ReleaseLease with the error and the tokens of the rest
           └──► LOST      drop everything

The buffer may be away for a while: calls are repeated unchanged, and generation goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from flotilla.buffer.v1 import buffer_pb2
from services.common.errors import Aborted, DeadlineExceeded, FlotillaError, NotFound, ResourceExhausted, Unavailable
from services.common.kill_points import kill_point
from services.common.logs import get_logger
from services.common.rpc import seconds
from services.rollout_gateway.buffer_client import BufferClient, portions
from services.rollout_gateway.codec import group_from
from services.rollout_gateway.generator import Generator
from services.rollout_gateway.group import Fragment, Group, SampleProgress
from services.rollout_gateway.race import race

COALESCE_S = 0.5
"""Finished samples wait at most this long for others of their group: grading needs the whole group anyway."""
RENEWALS_PER_TTL = 3

log = get_logger(__name__)


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
    why: str = ""
    """Why it was set."""

    @classmethod
    def of(cls, lease: buffer_pb2.WorkLease) -> Held:
        """A lease as the buffer gives it."""
        return cls(group_from(lease), lease.lease_token, seconds(lease.ttl))

    def add_finished(self, samples: list[SampleProgress]) -> None:
        """Note samples to hand in."""
        self.ready += samples
        self.some_ready.set()
        if not self.group.unfinished():
            self.all_ready.set()

    def end_early(self, why: str) -> None:
        """Stop the work; the first reason counts."""
        self.why = self.why or why
        self.stop.set()


class LeaseWork:
    """What is done with a lease."""

    def __init__(self, client: BufferClient, generator: Generator) -> None:
        self._client = client
        self._generator = generator

    async def see_through(self, held: Held) -> Outcome:
        """Work on a lease to its end, whatever that is."""
        error = ""
        try:
            outcome = await race(self._generate(held), self._submit_all(held), self._renew(held))
        except (Aborted, NotFound, Unavailable, DeadlineExceeded, ResourceExhausted) as lost:
            outcome, error = Outcome.LOST, str(lost)
        except FlotillaError as failure:
            outcome, error = Outcome.FAILED, str(failure)
        if outcome is not Outcome.COMPLETE:
            log.info("work ended early", group=held.group.group_id, outcome=outcome.value, reason=held.why, error=error)
        if outcome in (Outcome.STOPPED, Outcome.FAILED):
            await self._hand_back(held, error)
        return outcome

    async def _generate(self, held: Held) -> Outcome | None:
        await self._generator.generate(held.group, held.add_finished, held.stop)
        return Outcome.STOPPED if held.group.unfinished() else None

    async def _submit_all(self, held: Held) -> Outcome:
        while not held.all_ready.is_set() or held.ready:
            await held.some_ready.wait()
            await _within(COALESCE_S, held.all_ready)
            await self._submit(held)
        return Outcome.COMPLETE

    async def _submit(self, held: Held) -> None:
        """Hand in what is finished; it stays `ready` until the buffer has it."""
        held.some_ready.clear()
        for samples in portions(held.ready, lambda one: len(held.group.prompt) + len(one.token_ids)):
            kill_point("gateway_before_submit")
            await self._client.submit(held.token, held.group, samples)
            kill_point("gateway_after_submit")
            del held.ready[: len(samples)]

    async def _renew(self, held: Held) -> None:
        while True:
            await asyncio.sleep(held.ttl_s / RENEWALS_PER_TTL)
            for progress in _progress(held.group):
                await self._save(held, progress)

    async def _save(self, held: Held, progress: Sequence[Fragment]) -> None:
        response = await self._client.renew(held.token, held.group, progress)
        held.group.note_saved(progress)
        held.ttl_s = seconds(response.ttl)
        if response.stop_reason:
            held.end_early(buffer_pb2.StopReason.Name(response.stop_reason))

    async def _hand_back(self, held: Held, error: str) -> None:
        try:
            await self._submit(held)
            if held.group.unfinished():
                *earlier, last = _progress(held.group)
                for progress in earlier:
                    await self._save(held, progress)
                kill_point("gateway_before_release")
                await self._client.release(held.token, held.group, error, last)
        except FlotillaError as failure:
            log.warning("a lease could not be released; it will expire", group=held.group.group_id, error=str(failure))


def _progress(group: Group) -> list[list[Fragment]]:
    """What the buffer does not have, in portions: at least one, though it may be empty."""
    return portions(group.unsaved(), lambda one: len(one.token_ids)) or [[]]


async def _within(timeout_s: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
