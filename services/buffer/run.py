"""What the parts of the buffer share about one run: spec, ledger, prompts, and the pulse that wakes long polls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from services.buffer.capacity import MEMORY_SHARE
from services.buffer.connection import memory_use
from services.buffer.data import Prompt, PromptData
from services.buffer.filters import BufferFilter, GroupFilter
from services.buffer.ledger import Ledger
from services.buffer.records import Group
from services.common.errors import InvalidArgument, NotFound
from services.common.spec import RunSpec

T = TypeVar("T")

RECHECK_S = 1.0
"""A long poll looks again this often even if nothing stirs, since leases lapse without anybody's doing."""
MAX_WAIT_S = 60.0
"""Longest long poll."""
COMMIT_SHARE = 0.6
MAX_REMEMBERED = 1 << 14
"""Prompts, for a submit to ask for: as many groups as are under lease, and some."""


class Pulse:
    """Wakes everybody who waits for a change of the ledger.

    Whoever looks and then waits notes `beats` before the look, so that a beat in between is not lost.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.beats = 0

    def beat(self) -> None:
        """Something changed."""
        self.beats += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Return when there have been more beats than were seen, or after the timeout."""
        if self.beats > seen:
            return
        event = self._event
        # Not asyncio.wait_for: in Python 3.11 it can swallow a cancellation that meets the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()


class Turnstile(Generic[T]):
    """Lets those who wait for a pulse ask one after the other, until one asks in vain: so would the others."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse, self._lock = pulse, asyncio.Lock()
        self._vain: tuple[int, float] = (-1, 0.0)
        """Beat and time of the last attempt in vain."""

    async def ask(self, attempt: Callable[[], Awaitable[list[T] | None]]) -> list[T]:
        """What the attempt brings; [] without asking if another has asked in vain since the last beat.

        An attempt that brings None says nothing about what others would get.
        """
        async with self._lock:
            beats, now = self._pulse.beats, time.monotonic()
            if self._vain[0] == beats and now < self._vain[1] + RECHECK_S:
                return []
            answer = await attempt()
            if answer == []:
                self._vain = (beats, now)
            return answer or []


@dataclass(frozen=True, slots=True)
class Memory:
    """What Redis uses, in bytes."""

    used: int = 0
    limit: int = 0
    """0 if there is none."""

    @property
    def wants_commit(self) -> bool:
        """From here on the trainer is asked for an early checkpoint."""
        return self.limit > 0 and self.used >= COMMIT_SHARE * self.limit

    @property
    def is_short(self) -> bool:
        """From here on nothing fresh is issued, as long as a commit can free something."""
        return self.limit > 0 and self.used >= MEMORY_SHARE * self.limit


@dataclass(slots=True)
class Run:
    """One run, as the buffer serves it."""

    spec: RunSpec
    ledger: Ledger
    tokenizer: Any
    stop_token_ids: list[int]
    training: PromptData
    evaluation: dict[str, PromptData]
    group_filter: GroupFilter
    """Decides which graded groups are kept."""
    buffer_filter: BufferFilter | None
    """Decides which interrupted groups go on; None takes all, oldest first."""
    pulse: Pulse = field(default_factory=Pulse)
    grade_pulse: Pulse = field(default_factory=Pulse)
    """A group is complete."""
    stop_pulse: Pulse = field(default_factory=Pulse)
    """Something may have changed that stops leases."""
    memory: Memory = Memory()
    """As of the last look."""
    remembered: dict[str, Prompt] = field(default_factory=dict)
    """Prompts of the groups that were leased last, which a submit asks for."""

    async def look_at_memory(self) -> None:
        """Note what Redis uses now."""
        self.memory = Memory(*await memory_use(self.ledger.redis))

    def turn(self) -> None:
        """Something happened to the run as a whole: wake long polls and those who watch for stops."""
        self.pulse.beat()
        self.stop_pulse.beat()

    def check_run_id(self, run_id: str) -> None:
        """Raise if a request is for another run, or for none."""
        if not run_id:
            raise InvalidArgument("run_id is empty", "run_id")
        if run_id != self.spec.run_id:
            raise NotFound(f"this buffer serves run {self.spec.run_id}, not {run_id}")

    def data_digest(self) -> str:
        """SHA-256 of all prompts and labels, in hexadecimal."""
        parts = [self.training.digest(), *(f"{name}:{data.digest()}" for name, data in sorted(self.evaluation.items()))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def prompt(self, group: Group) -> Prompt:
        """The prompt of a group."""
        if group.is_evaluation:
            return self.evaluation[group.text("set")].prompts[group.number("index")]
        return self.training.at(group.prompt_number)

    def remember(self, group_id: str, prompt: Prompt) -> None:
        """Note the prompt of a group that is leased now."""
        self.remembered[group_id] = prompt
        if len(self.remembered) > MAX_REMEMBERED:
            del self.remembered[next(iter(self.remembered))]

    async def prompt_of(self, group_id: str) -> Prompt:
        """The prompt of a group. Raises NotFound if it was never issued."""
        if (prompt := self.remembered.get(group_id)) is None:
            (group,) = await self.ledger.groups([group_id])
            prompt = self.prompt(group)
        return prompt

    def group_size(self, group_id: str) -> int:
        """Samples in a group."""
        if group_id.startswith("e"):
            return self.spec.evaluation.n_samples_per_prompt
        return self.spec.rollout.n_samples_per_prompt

    async def poll(self, attempt: Callable[[], Awaitable[T]], done: Callable[[T], bool], wait_s: float) -> T:
        """Repeat an attempt, at every pulse, until it is done or the time is up; returns the last answer."""
        give_up = time.monotonic() + min(wait_s, MAX_WAIT_S)
        while True:
            seen = self.pulse.beats
            answer = await attempt()
            left = give_up - time.monotonic()
            if done(answer) or left <= 0:
                return answer
            await self.pulse.wait(seen, min(RECHECK_S, left))
