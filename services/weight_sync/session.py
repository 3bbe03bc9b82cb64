"""One session: brings one version to a set of engines, in two phases.

    agents    WaitRead ─────────────┐                  ┌─ RunTransfer ────┐
    engines   GetParameterManifest ─┴─ plan ─ Start… ──┴─ ReceiveWeights ─┴─ digests equal? ─ FinishWeightUpdate

Until FinishWeightUpdate every engine serves its old version, and whatever goes wrong aborts the session everywhere.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flotilla.rollout_gateway.v1 import engine_pb2
from flotilla.weight_sync.v1 import agent_pb2
from services.common.board import StatusBoard
from services.common.errors import Aborted, FlotillaError
from services.common.logs import get_logger
from services.common.rpc import call, duration, new_request_id
from services.common.spec import WeightSyncSpec
from services.weight_sync import codec
from services.weight_sync.digest import Digest, total
from services.weight_sync.peers import Engine, Peers
from services.weight_sync.plan import agreed_manifest, make_plan
from services.weight_sync.records import ManifestParameter, Plan, PolicyVersion, ShardSlice

CALL_TIMEOUT_S = 30.0
"""For calls that only note something; a manifest takes an engine a moment."""
ABORT_TIMEOUT_S = 5.0
"""An abort that does not get through is made up for by the session's own deadline."""
READ_POLL_S = 30.0
MARGIN_S = 5.0
"""What a long call may take beyond the deadline that the peer keeps."""

log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A session in which every byte arrived; seconds, and bytes to one receiver."""

    version: PolicyVersion
    engines: tuple[str, ...]
    sender_digest: str
    receiver_digests: tuple[str, ...]
    equal: bool
    """False: some receiver got other bytes than were sent, and nothing was loaded."""
    read_quantise_seconds: float
    connect_seconds: float
    """Until the slowest sender and its receivers were connected."""
    wire_seconds: float
    load_seconds: float
    pause_seconds: float
    total_seconds: float
    wire_bytes: int
    plain_bytes: int


@dataclass(slots=True)
class PlanCache:
    """What stays the same from session to session: manifests by start of an engine, and the last plan."""

    manifests: dict[tuple[str, str], tuple[ManifestParameter, ...]] = field(default_factory=dict)
    plan: Plan | None = None
    _inputs: Any = None

    def plan_for(
        self,
        slices: tuple[tuple[ShardSlice, ...], ...],
        manifests: Sequence[tuple[ManifestParameter, ...]],
        settings: WeightSyncSpec,
    ) -> Plan:
        """The plan, made anew only if something changed."""
        manifest = agreed_manifest(manifests)
        if self.plan is None or self._inputs != (slices, manifest):
            self.plan = make_plan(slices, manifest, settings.quantization, settings.bucket_bytes)
            self._inputs = (slices, manifest)
        return self.plan


@dataclass(slots=True)
class Session:
    """Runs once."""

    peers: Peers
    board: StatusBoard
    run_id: str
    settings: WeightSyncSpec
    version: PolicyVersion
    engines: tuple[Engine, ...]
    cache: PlanCache
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    committing: bool = False
    """True from the moment from which some engine may take the version."""
    finished: set[tuple[str, str]] = field(default_factory=set)
    """Starts of the engines that have taken it."""

    async def run(self) -> Outcome:
        """Bring the version to the engines.

        Raises:
            FlotillaError: What went wrong; engines that are not in `finished` do not serve the version.
        """
        begun = time.monotonic()
        plan, rendezvous = await self._prepare()
        try:
            await self._start(plan, rendezvous)
            sent, receiver_digests = await self._transfer(plan, rendezvous)
            digest = str(total(Digest.parse(one.digest) for one in sent))
            equal = all(one == digest for one in receiver_digests)
            loads = await self._finish() if equal else []
        except BaseException:
            await asyncio.shield(self._abort())
            raise
        if not equal:
            await self._abort()
        return Outcome(
            version=self.version,
            engines=tuple(engine.engine_id for engine in self.engines),
            sender_digest=digest,
            receiver_digests=tuple(receiver_digests),
            equal=equal,
            read_quantise_seconds=max(one.read_quantise_seconds for one in await self._held(wait_s=0)),
            connect_seconds=max(one.connect_seconds for one in sent),
            wire_seconds=max(one.wire_seconds for one in sent),
            load_seconds=max((load.load_seconds for load in loads), default=0.0),
            pause_seconds=max((load.pause_seconds for load in loads), default=0.0),
            total_seconds=time.monotonic() - begun,
            wire_bytes=plan.wire_bytes,
            plain_bytes=plan.plain_bytes,
        )

    async def _prepare(self) -> tuple[Plan, str]:
        held, manifests = await together(self._wait_read(), together(*(self._manifest(e) for e in self.engines)))
        slices = tuple(tuple(codec.slice_from_proto(one) for one in agent.slices) for agent in held)
        return self.cache.plan_for(slices, manifests, self.settings), held[0].rendezvous_address

    async def _wait_read(self) -> list[agent_pb2.WaitReadResponse]:
        with self.board.waiting(f"the weight agents to read version {self.version}"):
            held = await self._held(READ_POLL_S)
        for agent, response in enumerate(held):
            if not response.read or codec.version_from_proto(response.version) != self.version:
                raise Aborted(f"weight agent {agent} does not hold version {self.version}")
        return held

    async def _held(self, wait_s: float) -> list[agent_pb2.WaitReadResponse]:
        request = agent_pb2.WaitReadRequest(
            run_id=self.run_id, version=codec.version_to_proto(self.version), wait_timeout=duration(wait_s)
        )
        calls = (call(agent.WaitRead, request, timeout_s=wait_s + MARGIN_S) for agent in self.peers.agents)
        return await together(*calls)

    async def _manifest(self, engine: Engine) -> tuple[ManifestParameter, ...]:
        if engine.start not in self.cache.manifests:
            stub = self.peers.engine(engine.address)
            request = engine_pb2.GetParameterManifestRequest(run_id=self.run_id)
            response = await call(stub.GetParameterManifest, request, timeout_s=CALL_TIMEOUT_S)
            parameters = tuple(codec.parameter_from_proto(one) for one in response.parameters)
            self.cache.manifests[engine.start] = parameters
        return self.cache.manifests[engine.start]

    async def _start(self, plan: Plan, rendezvous: str) -> None:
        buckets = codec.buckets_to_proto(plan.buckets)
        first_rank = len(self.peers.agents)
        calls = []
        for engine in self.engines:
            request = engine_pb2.StartWeightUpdateRequest(
                run_id=self.run_id,
                request_id=new_request_id(),
                session_id=self.session_id,
                version=codec.version_to_proto(self.version),
                rendezvous_address=rendezvous,
                world_size=self._world_size(),
                first_rank=first_rank,
                buckets=buckets,
                session_timeout=duration(self.settings.session_timeout_s),
            )
            first_rank += engine.worker_count
            stub = self.peers.engine(engine.address)
            calls.append(call(stub.StartWeightUpdate, request, timeout_s=CALL_TIMEOUT_S))
        await together(*calls)

    async def _transfer(self, plan: Plan, rendezvous: str) -> tuple[list[agent_pb2.RunTransferResponse], list[str]]:
        """Answers of all senders, and digest of every worker."""
        with self.board.waiting(f"version {self.version} to reach {len(self.engines)} engines"):
            sent, received = await together(
                together(*(self._send(rank, plan, rendezvous) for rank in range(len(self.peers.agents)))),
                together(*(self._receive(engine) for engine in self.engines)),
            )
        return sent, [one for engine in received for one in engine.digests]

    async def _send(self, rank: int, plan: Plan, rendezvous: str) -> agent_pb2.RunTransferResponse:
        request = agent_pb2.RunTransferRequest(
            run_id=self.run_id,
            request_id=new_request_id(),
            session_id=self.session_id,
            version=codec.version_to_proto(self.version),
            rendezvous_address=rendezvous,
            world_size=self._world_size(),
            rank=rank,
            buckets=codec.buckets_to_proto(plan.buckets),
            session_timeout=duration(self.settings.session_timeout_s),
        )
        return await call(self.peers.agents[rank].RunTransfer, request, timeout_s=self._transfer_timeout_s())

    async def _receive(self, engine: Engine) -> engine_pb2.ReceiveWeightsResponse:
        request = engine_pb2.ReceiveWeightsRequest(
            run_id=self.run_id, request_id=new_request_id(), session_id=self.session_id
        )
        stub = self.peers.engine(engine.address)
        return await call(stub.ReceiveWeights, request, timeout_s=self._transfer_timeout_s())

    async def _finish(self) -> list[engine_pb2.FinishWeightUpdateResponse]:
        """Let every engine take the version, and go on with the others where one fails."""
        self.committing = True
        with self.board.waiting(f"{len(self.engines)} engines to load version {self.version}"):
            results = await asyncio.gather(*map(self._finish_one, self.engines), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _finish_one(self, engine: Engine) -> engine_pb2.FinishWeightUpdateResponse:
        request = engine_pb2.FinishWeightUpdateRequest(
            run_id=self.run_id, request_id=new_request_id(), session_id=self.session_id
        )
        stub = self.peers.engine(engine.address)
        response = await call(stub.FinishWeightUpdate, request, timeout_s=self._transfer_timeout_s())
        self.finished.add(engine.start)
        return response

    async def _abort(self) -> None:
        transfer = agent_pb2.AbortTransferRequest(
            run_id=self.run_id, request_id=new_request_id(), session_id=self.session_id
        )
        update = engine_pb2.AbortWeightUpdateRequest(
            run_id=self.run_id, request_id=new_request_id(), session_id=self.session_id
        )
        stubs = [self.peers.engine(e.address) for e in self.engines if e.start not in self.finished]
        calls = [
            *(call(agent.AbortTransfer, transfer, timeout_s=ABORT_TIMEOUT_S) for agent in self.peers.agents),
            *(call(stub.AbortWeightUpdate, update, timeout_s=ABORT_TIMEOUT_S) for stub in stubs),
        ]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, FlotillaError):
                log.info("an abort did not get through", session=self.session_id, error=str(result))

    def _world_size(self) -> int:
        return len(self.peers.agents) + sum(engine.worker_count for engine in self.engines)

    def _transfer_timeout_s(self) -> float:
        return self.settings.session_timeout_s + MARGIN_S


async def together(*work: Awaitable[T]) -> Any:
    """The results of all; if one fails, the others are cancelled and ended before its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
