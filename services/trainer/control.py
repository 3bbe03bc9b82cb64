"""What others may see of the trainer and ask of it, shared by the loop and the servicer. Lives in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum


class Phase(Enum):
    """What the trainer does; names as in TrainerPhase."""

    STARTING = "STARTING"
    WAITING = "WAITING"
    TRAINING = "TRAINING"
    PUBLISHING = "PUBLISHING"
    SAVING = "SAVING"
    PAUSED = "PAUSED"
    DONE = "DONE"


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A finished rollout step."""

    step: int
    """Rollout steps done, this one included."""
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint."""

    step: int
    path: str


@dataclass(slots=True)
class Control:
    """The trainer's state, and what was asked of it."""

    phase: Phase = Phase.STARTING
    run_epoch: int = 0
    """0 before BeginEpoch."""
    step: int = 0
    committed_step: int = 0
    last: FinishedStep | None = None
    paused_at_s: float | None = None
    """Monotonic time of the pause; None while not paused."""
    _saves: list[asyncio.Future[Saved]] = field(default_factory=list)
    _watchers: set[asyncio.Queue[FinishedStep]] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def pause(self) -> None:
        """Start no further step. Idempotent."""
        self.paused_at_s = self.paused_at_s or time.monotonic()

    def resume(self) -> float:
        """Go on; returns how long it was paused, in seconds. Idempotent."""
        paused_for = time.monotonic() - self.paused_at_s if self.paused_at_s else 0.0
        self.paused_at_s = None
        self._changed.set()
        return paused_for

    async def saved(self) -> Saved:
        """Ask for a checkpoint and wait until it is committed."""
        future: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
        self._saves.append(future)
        self._changed.set()
        return await future

    @property
    def save_wanted(self) -> bool:
        """Whether somebody waits for a checkpoint."""
        return bool(self._saves)

    def answer_saves(self, saved: Saved) -> None:
        """A checkpoint is committed."""
        waiting, self._saves = self._saves, []
        for future in waiting:
            if not future.done():
                future.set_result(saved)

    async def changed(self) -> None:
        """Wait for a resume, or for somebody to ask for a checkpoint."""
        await self._changed.wait()
        self._changed.clear()

    def finish_step(self, values: dict[str, float]) -> None:
        """Tell watchers of the step that is done."""
        self.last = FinishedStep(self.step, values)
        for watcher in self._watchers:
            watcher.put_nowait(self.last)

    async def watch(self, stopping: asyncio.Event) -> AsyncIterator[FinishedStep]:
        """Every step that finishes from now on, until `stopping` is set."""
        watcher: asyncio.Queue[FinishedStep] = asyncio.Queue()
        self._watchers.add(watcher)
        stop = asyncio.ensure_future(stopping.wait())
        try:
            while not stop.done():
                step = asyncio.ensure_future(watcher.get())
                await asyncio.wait({step, stop}, return_when=asyncio.FIRST_COMPLETED)
                if step.done():
                    yield step.result()
                else:
                    step.cancel()
        finally:
            stop.cancel()
            self._watchers.discard(watcher)
