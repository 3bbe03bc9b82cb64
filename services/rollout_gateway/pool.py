"""The engines as the gateway uses them: the table, the semaphores, and those who wait for a change in either."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
from prometheus_client import Gauge

from flotilla.rollout_gateway.v1 import engine_pb2_grpc
from services.common.board import StatusBoard
from services.common.logs import get_logger
from services.common.rpc import open_channel
from services.common.service import now_s
from services.rollout_gateway.registry import Engine, EngineTable
from services.rollout_gateway.router import Router
from services.rollout_gateway.spans import Version

ENGINE_TTL_S = 5.0
"""Engines renew every second; one that was too busy to do so four times is taken for dead."""

ENGINES = Gauge("flotilla_gateway_engines", "Engines that are known")
RUNNING = Gauge("flotilla_gateway_running_samples", "Samples that run on engines")
WAITING = Gauge("flotilla_gateway_waiting_samples", "Samples that wait for an engine")

log = get_logger(__name__)


@dataclass(slots=True)
class Connection:
    """A way to one incarnation of an engine."""

    channel: grpc.aio.Channel
    stub: engine_pb2_grpc.EngineServiceAsyncStub
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this incarnation is no longer known."""


@dataclass(slots=True)
class Places:
    """Part of an engine's semaphore, held by a group."""

    engine: Engine
    connection: Connection
    samples: int


class EnginePool:
    """Engines, and groups that want one."""

    def __init__(self, server_concurrency: int, board: StatusBoard) -> None:
        """Args:
        server_concurrency: Samples that one engine may run at once.
        board: Where waits are shown.
        """
        self.table = EngineTable(ENGINE_TTL_S, time.time_ns())
        self.router = Router(server_concurrency)
        self._board = board
        self._connections: dict[str, Connection] = {}
        self._changed = asyncio.Event()

    def engines(self) -> list[Engine]:
        """Known engines, sorted by id."""
        return self.table.list()

    def capacity(self) -> int:
        """Samples that the engines that serve may run at once."""
        return self.router.capacity(self.engines())

    async def change(self) -> None:
        """Wait until the table or a load changes."""
        await self._changed.wait()

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def register(self, engine: Engine) -> None:
        """As EngineTable.register, now."""
        self.table.register(engine, now_s())
        self._follow_table()

    def renew(self, engine: Engine) -> None:
        """As EngineTable.renew, now."""
        before = self.table.revision
        self.table.renew(engine, now_s())
        if self.table.revision != before:
            self.notify()

    def lose(self, engine: Engine, reason: str) -> None:
        """Forget an incarnation that does not answer."""
        if self.table.remove(engine):
            log.warning("engine lost", engine=engine.engine_id, reason=reason)
            self._follow_table()

    async def expire(self) -> None:
        """Forget engines as they expire, for ever."""
        while True:
            expiry = self.table.next_expiry_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if expiry is None else max(0.0, expiry - now_s())):
                    await self.change()
            for engine in self.table.expire(now_s()):
                log.warning("engine lost", engine=engine.engine_id, reason="it was not renewed")
                self._follow_table()

    @contextlib.asynccontextmanager
    async def places(self, samples: int, required: Version | None) -> AsyncIterator[Places]:
        """Places for a group on one engine, until the block ends; waits until there are some."""
        engine = self.router.pick(self.engines(), required) or await self._wait_for_place(samples, required)
        places = Places(engine, self._connect(engine), samples)
        self.router.take(engine, samples)
        RUNNING.inc(samples)
        try:
            yield places
        finally:
            self.give_back(places, places.samples)

    def give_back(self, places: Places, samples: int) -> None:
        """Free places of samples that ended before the others."""
        places.samples -= samples
        RUNNING.dec(samples)
        self.router.give_back(places.engine, samples)
        self.notify()

    async def _wait_for_place(self, samples: int, required: Version | None) -> Engine:
        WAITING.inc(samples)
        try:
            with self._board.waiting(f"an engine that serves {required or 'any version'} and has a free place"):
                while (engine := self.router.pick(self.engines(), required)) is None:
                    await self.change()
                return engine
        finally:
            WAITING.dec(samples)

    def _connect(self, engine: Engine) -> Connection:
        found = self._connections.get(engine.incarnation)
        if found is None:
            channel = open_channel(engine.address)
            found = Connection(channel, engine_pb2_grpc.EngineServiceStub(channel))
            self._connections[engine.incarnation] = found
        return found

    def _follow_table(self) -> None:
        known = {engine.incarnation for engine in self.engines()}
        for incarnation in [one for one in self._connections if one not in known]:
            self._connections.pop(incarnation).gone.set()
        ENGINES.set(len(known))
        self.notify()
