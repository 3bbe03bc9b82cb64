"""Whether the engine serves, and with which weights: what it tells the gateway."""

from __future__ import annotations

import asyncio
from enum import Enum

from services.rollout_gateway.engine.vllm_engine import VllmEngine
from services.rollout_gateway.spans import Version


class Hold(Enum):
    """Why generation is paused; it goes on when nobody holds it."""

    BY_HAND = "by hand"
    WEIGHT_UPDATE = "weight update"


class ServingState:
    """The version and the holds of one engine."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._holds: set[Hold] = set()
        self._lock = asyncio.Lock()
        self.version: Version | None = None
        self.changed = asyncio.Event()
        """Set at every change; the heartbeat clears it."""

    @property
    def paused(self) -> bool:
        """True while somebody holds generation."""
        return bool(self._holds)

    async def pause(self, hold: Hold) -> None:
        """Freeze generation. Idempotent."""
        async with self._lock:
            if not self._holds:
                await self._engine.pause()
            self._holds.add(hold)
            self.changed.set()

    async def resume(self, hold: Hold) -> None:
        """Let go; generation goes on when this was the last hold. Idempotent."""
        async with self._lock:
            if self._holds == {hold}:
                await self._engine.resume()
            self._holds.discard(hold)
            self.changed.set()

    async def take_version(self, version: Version) -> None:
        """Serve new weights from the next token on. Call it while paused."""
        assert self._holds, "weights change only while generation is paused"
        await self._engine.take_version(version)
        self.version = version
        self.changed.set()
