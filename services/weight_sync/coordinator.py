"""Brings the published version to every engine, whatever dies on the way.

The invariant: an engine takes a version only with the digest that the agents sent, and a version is recorded LIVE only
when every known engine serves it and there is one.

    PublishVersion ─► target ─┐            ┌─ engines behind it: one Session over all of them
    gateway.ListEngines ──────┴─ run() ────┼─ none behind, not recorded yet: RecordVersion(LIVE)
                                           └─ else: wait until target or engines change

A failed session is tried again after a pause. Nothing is kept: after a restart the registry says what the target is and
the gateway what the engines serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from flotilla.buffer.v1 import registry_pb2
from flotilla.rollout_gateway.v1 import gateway_pb2
from services.common.board import StatusBoard
from services.common.errors import Aborted, FlotillaError
from services.common.logs import get_logger
from services.common.rpc import call, duration, new_request_id
from services.common.service import Backoff
from services.common.spec import RunSpec
from services.weight_sync import codec
from services.weight_sync.history import append_outcome
from services.weight_sync.peers import Engine, Peers, engine_from_proto
from services.weight_sync.records import Plan, PolicyVersion
from services.weight_sync.session import Outcome, PlanCache, Session

CALL_TIMEOUT_S = 10.0
ENGINES_POLL_S = 30.0
MARGIN_S = 5.0
"""What a long poll may take beyond its wait."""
START_PATIENCE_S = 600.0
"""The buffer may still be loading its data."""
PAUSE_FIRST_S, PAUSE_MOST_S = 0.05, 1.0
"""Between failed sessions: an engine that died leaves the list within seconds, and then the pause ends early."""

log = get_logger(__name__)


@dataclass(slots=True)
class Target:
    """The version to bring, and how far that is."""

    version: PolicyVersion
    published_s: float
    """Monotonic time."""
    recorded: registry_pb2.VersionState = registry_pb2.VERSION_STATE_UNSPECIFIED
    outcome: Outcome | None = None
    """Of the last session that brought it to an engine."""


@dataclass(slots=True)
class Failures:
    """Sessions of one engine that failed since the version was published."""

    count: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """For GetSyncStatus."""

    target: PolicyVersion | None
    engines: tuple[Engine, ...]
    """With the versions that the coordinator knows of."""
    failures: dict[str, Failures] = field(repr=False)
    sessions: int
    digest_mismatches: int

    @property
    def settled(self) -> bool:
        """True if every known engine serves the target, and there is one."""
        return bool(self.engines) and all(engine.version == self.target for engine in self.engines)


class Coordinator:
    """See the module. Lives in one event loop."""

    def __init__(self, spec: RunSpec, peers: Peers, board: StatusBoard) -> None:
        self._spec, self._peers, self._board = spec, peers, board
        self._cache = PlanCache()
        self._target: Target | None = None
        self._superseded: list[Target] = []
        """Recorded as PUBLISHING, and never to be LIVE."""
        self._epoch = 0
        self._engines: tuple[Engine, ...] = ()
        self._taken: dict[tuple[str, str], PolicyVersion] = {}
        """Versions that starts of engines have taken here; the gateway's list learns of them a little later."""
        self._failures: dict[str, Failures] = {}
        self._sessions = self._mismatches = 0
        self._changed = asyncio.Event()
        self._pause_s = PAUSE_FIRST_S

    # ------------------------------------------------------------------------------------------- asked from outside

    def publish(self, version: PolicyVersion) -> None:
        """Make a version the target, unless it or a newer one is. Raises Aborted for an old epoch."""
        if version.run_epoch < self._epoch:
            raise Aborted(f"version {version} is of an old epoch: epoch {self._epoch} runs")
        self._epoch = version.run_epoch
        before = self._target
        if before is None or version > before.version:
            log.info("new target", version=str(version))
            self._target, self._failures, self._pause_s = Target(version, time.monotonic()), {}, PAUSE_FIRST_S
            if before and before.recorded == registry_pb2.VERSION_STATE_PUBLISHING:
                self._superseded.append(before)
            self._changed.set()

    def status(self) -> Status:
        """How it stands."""
        target = self._target.version if self._target else None
        return Status(target, self._known(), dict(self._failures), self._sessions, self._mismatches)

    def plan(self) -> Plan | None:
        """The plan of the last session; None before the first."""
        return self._cache.plan

    # ---------------------------------------------------------------------------------------------------- background

    async def recover(self) -> None:
        """Register with the buffer, and take up the newest version of the current epoch."""
        spec, registry = self._spec, self._peers.registry
        register = registry_pb2.RegisterRunRequest(
            run_id=spec.run_id, request_id=new_request_id(), spec_digest=spec.digest()
        )
        listing = registry_pb2.ListVersionsRequest(run_id=spec.run_id)
        with self._board.waiting("the buffer, to register the run"):
            registered = await call(
                registry.RegisterRun, register, timeout_s=CALL_TIMEOUT_S, patience_s=START_PATIENCE_S
            )
            versions = await call(registry.ListVersions, listing, timeout_s=CALL_TIMEOUT_S, patience_s=START_PATIENCE_S)
        self._epoch = registered.run.run_epoch
        self._target = recovered_target(versions.versions, self._epoch, time.monotonic())

    async def watch_engines(self) -> None:
        """Follow the gateway's list of engines, for ever."""
        backoff, revision = Backoff(most_s=PAUSE_MOST_S), 0
        while True:
            request = gateway_pb2.ListEnginesRequest(
                run_id=self._spec.run_id, known_revision=revision, wait_timeout=duration(ENGINES_POLL_S)
            )
            try:
                listed = await call(self._peers.gateway.ListEngines, request, timeout_s=ENGINES_POLL_S + MARGIN_S)
            except FlotillaError as error:
                revision = 0  # a gateway that restarted counts anew
                with self._board.waiting(f"the rollout gateway: {error}"):
                    await backoff.wait()
                continue
            backoff.reset()
            revision = listed.revision
            await self._set_engines(tuple(engine_from_proto(one) for one in listed.engines))

    async def run(self) -> None:
        """Reconcile for ever."""
        while True:
            self._changed.clear()
            try:
                await self._step()
                self._pause_s = PAUSE_FIRST_S
            except FlotillaError as error:
                log.warning("cannot bring the version yet", error=str(error), pause_s=self._pause_s)
                with self._board.waiting(f"the next attempt after: {error}"):
                    await self._pause()

    # -------------------------------------------------------------------------------------------------------- parts

    async def _step(self) -> None:
        target, engines = self._target, self._known()
        if target is None:
            await self._idle("a version to be published")
        elif self._superseded:
            await self._record_superseded(target)
        elif target.recorded == registry_pb2.VERSION_STATE_UNSPECIFIED:
            await self._record(target, registry_pb2.VERSION_STATE_PUBLISHING)
        elif behind := tuple(engine for engine in engines if engine.version != target.version):
            await self._bring(target, behind)
        elif engines and target.recorded != registry_pb2.VERSION_STATE_LIVE:
            await self._record(target, registry_pb2.VERSION_STATE_LIVE)
        else:
            await self._idle("a newer version or an engine without it" if engines else "an engine")

    async def _bring(self, target: Target, engines: tuple[Engine, ...]) -> None:
        spec = self._spec
        session = Session(self._peers, self._board, spec.run_id, spec.weight_sync, target.version, engines, self._cache)
        self._sessions += 1
        try:
            outcome = await self._until_obsolete(session)
            if outcome is None:
                return
            append_outcome(spec.run_dir, outcome)
            if not outcome.equal:
                self._mismatches += 1
                raise Aborted("the digests of what was sent and what was received differ")
            target.outcome = outcome
        except FlotillaError as error:
            for engine in engines:
                failures = self._failures.setdefault(engine.engine_id, Failures())
                failures.count, failures.last_error = failures.count + 1, str(error)
            raise
        finally:
            self._note_taken(session)

    async def _until_obsolete(self, session: Session) -> Outcome | None:
        """The outcome; None if a newer target or the loss of one of its engines ended it first."""
        running = asyncio.create_task(session.run(), name="session")
        try:
            while not running.done():
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait({running, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._changed.clear()
                if not running.done() and not session.committing and self._obsolete(session):
                    log.info("the session is obsolete", version=str(session.version))
                    return None
            return await running
        finally:
            running.cancel()
            await asyncio.wait({running})

    def _obsolete(self, session: Session) -> bool:
        superseded = self._target is None or self._target.version != session.version
        return superseded or not {e.start for e in session.engines} <= {e.start for e in self._engines}

    def _note_taken(self, session: Session) -> None:
        for engine in session.engines:
            if engine.start in session.finished:
                self._taken[engine.start] = session.version
            elif session.committing:
                self._taken.pop(engine.start, None)

    async def _record(self, target: Target, state: registry_pb2.VersionState) -> None:
        request = registry_pb2.RecordVersionRequest(
            run_id=self._spec.run_id, request_id=new_request_id(), version=_version_record(target, state)
        )
        try:
            await call(self._peers.registry.RecordVersion, request, timeout_s=CALL_TIMEOUT_S)
        except Aborted as error:
            log.warning("the target is of an old epoch", version=str(target.version), error=str(error))
            self._epoch = max(self._epoch, target.version.run_epoch + 1)
            if self._target is target:
                self._target = None
            return
        target.recorded = state
        if state == registry_pb2.VERSION_STATE_PUBLISHING and self._target is not target:
            self._superseded.append(target)
        log.info("recorded", version=str(target.version), state=registry_pb2.VersionState.Name(state))

    async def _record_superseded(self, target: Target) -> None:
        """Of the same epoch alone: the registry takes nothing about an old one."""
        for old in [one for one in self._superseded if one.version.run_epoch == target.version.run_epoch]:
            await self._record(old, registry_pb2.VERSION_STATE_FAILED)
        self._superseded.clear()

    async def _set_engines(self, engines: tuple[Engine, ...]) -> None:
        before, now = {e.start for e in self._engines}, {e.start for e in engines}
        self._engines = engines
        if before != now:
            log.info("engines", known=[engine.engine_id for engine in engines])
            self._changed.set()
        self._taken = {start: version for start, version in self._taken.items() if start in now}
        self._cache.manifests = {start: m for start, m in self._cache.manifests.items() if start in now}
        await self._peers.forget_engines({engine.address for engine in engines})

    def _known(self) -> tuple[Engine, ...]:
        return tuple(replace(e, version=self._taken.get(e.start, e.version)) for e in self._engines)

    async def _idle(self, for_what: str) -> None:
        with self._board.waiting(for_what):
            await self._changed.wait()

    async def _pause(self) -> None:
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_MOST_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), pause_s)


def recovered_target(versions: Sequence[registry_pb2.Version], epoch: int, now_s: float) -> Target | None:
    """The target after a restart: the newest version of the epoch that is on its way or live.

    Args:
        versions: Newest first.
        epoch: The current epoch of the run.
        now_s: Monotonic time.
    """
    open_states = (registry_pb2.VERSION_STATE_PUBLISHING, registry_pb2.VERSION_STATE_LIVE)
    for one in versions:
        if one.version.run_epoch == epoch and one.state in open_states:
            return Target(codec.version_from_proto(one.version), now_s, one.state)
    return None


def _version_record(target: Target, state: registry_pb2.VersionState) -> registry_pb2.Version:
    record = registry_pb2.Version(version=codec.version_to_proto(target.version), state=state)
    outcome = target.outcome
    if state == registry_pb2.VERSION_STATE_LIVE and outcome is not None:
        record.digest = outcome.sender_digest
        record.timings.CopyFrom(
            registry_pb2.VersionTimings(
                read_quantise_seconds=outcome.read_quantise_seconds,
                connect_seconds=outcome.connect_seconds,
                wire_seconds=outcome.wire_seconds,
                load_seconds=outcome.load_seconds,
                pause_seconds=outcome.pause_seconds,
                total_seconds=time.monotonic() - target.published_s,
                wire_bytes=outcome.wire_bytes,
            )
        )
    return record
