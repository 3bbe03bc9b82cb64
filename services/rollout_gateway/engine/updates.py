"""Weight updates in two phases: receive beside generation, then load under a short pause.

    start ──► RECEIVING ──receive──► RECEIVED ──finish──► LOADED
                  │  cut short           │ abort, or another session
                  └──────► gone ◄────────┘                      the engine still serves its old version

A load that fails leaves torn weights: the process must end. Loading therefore runs in a task of its own, which outlives
the call that asked for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.common.errors import Aborted, FailedPrecondition
from services.common.logs import get_logger
from services.rollout_gateway.engine.state import Hold, ServingState
from services.rollout_gateway.engine.vllm_engine import VllmEngine
from services.rollout_gateway.spans import Version

POLL_INTERVAL_S = 0.01
"""Workers cannot call us; asking costs them microseconds between two steps."""
POLL_MARGIN_S = 5.0
"""How long after a session's own deadline the workers may take to say that it passed."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    """Digests by worker, in hexadecimal, and the time of the slowest in seconds."""

    digests: list[str]
    wire_seconds: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """How long loading and the pause around it took, in seconds."""

    load_seconds: float
    pause_seconds: float


@dataclass(slots=True)
class Session:
    """One update."""

    session_id: str
    version: Version
    deadline: float
    """On the monotonic clock, in seconds."""
    received: Received | None = None
    loading: asyncio.Task[Loaded] | None = None


class WeightUpdates:
    """At most one session at a time."""

    def __init__(self, engine: VllmEngine, state: ServingState, on_torn: Callable[[BaseException], None]) -> None:
        self._engine = engine
        self._state = state
        self._on_torn = on_torn
        self._session: Session | None = None
        self._lock = asyncio.Lock()
        self.digest = ""
        self.finished = 0

    async def start(self, session_id: str, version: Version, timeout_s: float, request: bytes) -> None:
        """First phase. A repeat is answered; another session aborts the one that runs.

        Args:
            session_id: The session.
            version: What will be served.
            timeout_s: The workers end the session this long after its start.
            request: Serialized StartWeightUpdateRequest, for the workers.

        Raises:
            Aborted: The workers could not join.
            FailedPrecondition: The weights of another session are being loaded.
        """
        async with self._lock:
            if self._session and self._session.session_id == session_id:
                return
            await self._end_session()
            await self._ask("weight_sync_start", request)
            self._session = Session(session_id, version, time.monotonic() + timeout_s)

    async def receive(self, session_id: str) -> Received:
        """Wait for the bytes. Repeatable, also at the same time.

        Raises:
            Aborted: The session was cut short.
        """
        session = self._current(session_id)
        while session.received is None:
            states = await self._ask("weight_sync_poll", session_id)
            if self._session is not session:
                raise Aborted(f"session {session_id} was ended")
            if failed := [state["error"] for state in states if state["state"] == "failed"]:
                await self.abort(session_id)
                raise Aborted(f"a worker failed in session {session_id}: {failed[0]}")
            if all(state["state"] == "received" for state in states):
                slowest = max(state["wire_seconds"] for state in states)
                session.received = Received([state["digest"] for state in states], slowest)
            elif time.monotonic() > session.deadline + POLL_MARGIN_S:
                await self.abort(session_id)
                raise Aborted(f"session {session_id} passed its deadline")
            else:
                await asyncio.sleep(POLL_INTERVAL_S)
        return session.received

    async def finish(self, session_id: str) -> Loaded:
        """Second phase. A repeat joins the one that runs, or is answered with its result.

        Raises:
            Aborted: The session was cut short.
            FailedPrecondition: The bytes are not complete.
        """
        session = self._current(session_id)
        if session.received is None:
            raise FailedPrecondition(f"session {session_id} is not complete: wait for ReceiveWeights")
        if session.loading is None:
            session.loading = asyncio.create_task(self._load(session, session.received))
        return await asyncio.shield(session.loading)

    async def abort(self, session_id: str) -> None:
        """End a session without effect. Idempotent; a session that loads or has loaded stays."""
        async with self._lock:
            if self._session and self._session.session_id == session_id and not self._session.loading:
                await self._end_session()

    def _current(self, session_id: str) -> Session:
        if self._session is None or self._session.session_id != session_id:
            raise Aborted(f"session {session_id} is not open: it was ended, or the engine was restarted")
        return self._session

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session and session.loading and not session.loading.done():
            self._session = session
            raise FailedPrecondition(f"session {session.session_id} is being loaded")
        if session and not session.loading:
            await self._ask("weight_sync_abort", session.session_id)

    async def _load(self, session: Session, received: Received) -> Loaded:
        begin = time.monotonic()
        try:
            await self._state.pause(Hold.WEIGHT_UPDATE)
            results = await self._engine.on_workers("weight_sync_finish", session.session_id)
            await self._state.take_version(session.version)
            await self._state.resume(Hold.WEIGHT_UPDATE)
        except BaseException as error:
            self._on_torn(error)
            raise
        self.digest = received.digests[0]
        self.finished += 1
        loaded = Loaded(max(result["load_seconds"] for result in results), time.monotonic() - begin)
        log.info(
            "weights taken", version=str(session.version), session=session.session_id, pause_s=loaded.pause_seconds
        )
        return loaded

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self._engine.on_workers(method, *args)
        except Exception as error:  # vLLM hands on a worker's error as a plain Exception with its text
            raise Aborted(f"{method} failed in a worker: {error}") from error
