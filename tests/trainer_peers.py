"""Stand-ins for the trainer's peers: real gRPC servers over a few lists, which record what the trainer does.

FakeBuffer hands out batch b once version b is published, as the buffer does with max_staleness = 0, and while is_full
asks for a commit whenever an acknowledged batch is not committed. FakeAgent reads the shared memory as soon as a
version is announced, as the real agent does. FakeCoordinator only takes note.
"""

from __future__ import annotations

import asyncio
import mmap
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from flotilla.common.v1 import common_pb2
from flotilla.weight_sync.v1 import agent_pb2, agent_pb2_grpc, weight_sync_pb2, weight_sync_pb2_grpc
from services.common.errors import Aborted, FailedPrecondition
from services.common.rpc import bind_server, make_server, seconds
from tests.trainer_cases import make_samples

SAMPLES = 6


@dataclass
class Peers:
    """What all fakes share."""

    num_rollout: int
    epoch: int = 0
    stopped: bool = False
    published: list[tuple[int, int]] = field(default_factory=list)
    leases: list[buffer_pb2.LeaseBatchRequest] = field(default_factory=list)
    acked: list[tuple[int, int]] = field(default_factory=list)
    commits: list[tuple[int, str]] = field(default_factory=list)
    acks_at_commit: list[int] = field(default_factory=list)
    epochs: list[tuple[int, str, list[str]]] = field(default_factory=list)
    registrations: list[str] = field(default_factory=list)
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    registered: agent_pb2.RegisterShardsRequest | None = None
    held: common_pb2.PolicyVersion | None = None
    memory: dict[tuple[int, int], bytes] = field(default_factory=dict)
    before_announce: Callable[[], None] | None = None
    after_announce: Callable[[], None] | None = None
    refuse_publish: str = ""
    next_batch: int = 0
    hold_batches: bool = False
    is_full: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, what: Any, timeout_s: float = 60.0) -> None:
        async with self.changed, asyncio.timeout(timeout_s):
            await self.changed.wait_for(what)

    def batch_ready(self) -> bool:
        return not self.hold_batches and (self.epoch, self.next_batch) in self.published

    def commit_requested(self) -> bool:
        committed = max((step for step, _ in self.commits), default=0)
        return self.is_full and committed < self.next_batch

    def restart_agent(self) -> None:
        """As if another process had taken its place."""
        self.incarnation, self.registered, self.held = uuid.uuid4().hex, None, None

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Aborted(f"epoch {epoch} is old")


def digest(batch: int) -> str:
    return f"{batch:064x}"


def manifest(batch: int, replicas: int = 1) -> buffer_pb2.BatchManifest:
    """Of one or two data-parallel ranks."""
    samples = make_samples(SAMPLES, seed=batch)
    message = buffer_pb2.BatchManifest(batch=batch, digest=digest(batch), optimizer_steps=2, rollouts_per_step=[3, 3])
    for index, one in enumerate(samples):
        message.rows.add(
            group_id=f"g{index}",
            prompt_tokens=len(one.prompt),
            response_tokens=len(one.response),
            advantage=(-1.0) ** index,
            loss_denominator=max(1, sum(one.loss_mask)),
            optimizer_step=index // 3,
        )
    for step, rows, replica in ((0, [0, 2], 0), (0, [1], 1), (1, [3, 4, 5], 0), (1, [], 1)):
        if rows or replicas > 1:
            message.micro_batches.add(optimizer_step=step, rows=rows, data_parallel_rank=replica % replicas)
    message.stats.mean_reward = 0.5
    message.stats.kept_groups = 3
    message.stats.dropped_groups["zero_std"] = 2
    message.stats.rollout_seconds = 2.0
    message.stats.generated_tokens = 100
    message.stats.mixed_version_samples = 4
    message.stats.dead_epoch_samples = 1
    message.schedule.packing_efficiency = 0.75
    message.schedule.imbalance = 1.25
    return message


def read_memory(registered: agent_pb2.RegisterShardsRequest) -> bytes:
    with open(registered.shared_memory_path, "rb") as file:
        return mmap.mmap(file.fileno(), registered.shared_memory_bytes, access=mmap.ACCESS_READ)[:]


class FakeBuffer(buffer_pb2_grpc.BufferServiceServicer):
    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    async def LeaseBatch(self, request: Any, context: Any) -> buffer_pb2.LeaseBatchResponse:
        peers = self.peers
        peers._check_epoch(request.run_epoch)
        peers.leases.append(request)
        answer = buffer_pb2.LeaseBatchResponse(commit_requested=peers.commit_requested())
        if peers.next_batch == peers.num_rollout:
            answer.no_batch_reason = buffer_pb2.NO_BATCH_REASON_RUN_COMPLETE
            return answer
        try:
            await peers.until(peers.batch_ready, min(1.0, seconds(request.wait_timeout)))
        except TimeoutError:
            answer.no_batch_reason = buffer_pb2.NO_BATCH_REASON_NOT_SEALED
            return answer
        peers._check_epoch(request.run_epoch)
        answer.manifest.CopyFrom(manifest(peers.next_batch, request.data_parallel_size))
        return answer

    async def FetchSamples(self, request: Any, context: Any) -> buffer_pb2.FetchSamplesResponse:
        """Two rows a page."""
        begin = int(request.page_token or 0)
        samples = make_samples(SAMPLES, seed=request.batch)
        response = buffer_pb2.FetchSamplesResponse()
        for row in request.rows[begin : begin + 2]:
            one = samples[row]
            message = common_pb2.Sample(
                prompt_token_ids=one.prompt,
                response_token_ids=one.response,
                rollout_log_probs=one.rollout_log_probs,
                loss_mask=one.loss_mask,
            )
            response.payloads.append(message.SerializeToString())
        if begin + 2 < len(request.rows):
            response.next_page_token = str(begin + 2)
        return response

    async def AckBatch(self, request: Any, context: Any) -> buffer_pb2.AckBatchResponse:
        self.peers._check_epoch(request.run_epoch)
        assert request.digest == digest(request.batch)
        self.peers.acked.append((request.run_epoch, request.batch))
        self.peers.next_batch = request.batch + 1
        await self.peers.tell()
        return buffer_pb2.AckBatchResponse()

    async def Commit(self, request: Any, context: Any) -> buffer_pb2.CommitResponse:
        self.peers._check_epoch(request.run_epoch)
        self.peers.commits.append((request.step, request.checkpoint))
        self.peers.acks_at_commit.append(len(self.peers.acked))
        await self.peers.tell()
        return buffer_pb2.CommitResponse()

    async def GetEvaluation(self, request: Any, context: Any) -> buffer_pb2.GetEvaluationResponse:
        return buffer_pb2.GetEvaluationResponse(complete=True)


class FakeRegistry(registry_pb2_grpc.RunRegistryServiceServicer):
    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    async def RegisterRun(self, request: Any, context: Any) -> registry_pb2.RegisterRunResponse:
        return registry_pb2.RegisterRunResponse()

    async def GetRun(self, request: Any, context: Any) -> registry_pb2.GetRunResponse:
        state = registry_pb2.DESIRED_STATE_STOPPED if self.peers.stopped else registry_pb2.DESIRED_STATE_RUNNING
        return registry_pb2.GetRunResponse(run=registry_pb2.Run(desired_state=state))

    async def BeginEpoch(self, request: Any, context: Any) -> registry_pb2.BeginEpochResponse:
        peers = self.peers
        peers.epoch += 1
        peers.epochs.append((request.checkpoint_step, request.checkpoint, list(request.batch_digests)))
        peers.next_batch = request.checkpoint_step
        return registry_pb2.BeginEpochResponse(run_epoch=peers.epoch)

    async def SetDesiredState(self, request: Any, context: Any) -> registry_pb2.SetDesiredStateResponse:
        self.peers.stopped = request.desired_state == registry_pb2.DESIRED_STATE_STOPPED
        return registry_pb2.SetDesiredStateResponse()


class FakeAgent(agent_pb2_grpc.WeightAgentServiceServicer):
    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    async def RegisterShards(self, request: Any, context: Any) -> agent_pb2.RegisterShardsResponse:
        self.peers.registered = request
        self.peers.registrations.append(self.peers.incarnation)
        return agent_pb2.RegisterShardsResponse(incarnation=self.peers.incarnation)

    async def AnnounceVersion(self, request: Any, context: Any) -> agent_pb2.AnnounceVersionResponse:
        peers = self.peers
        if peers.before_announce:
            peers.before_announce()
        if peers.registered is None:
            raise FailedPrecondition("register the shards first")
        me, version = peers.incarnation, request.version
        peers.memory[version.run_epoch, version.step] = read_memory(peers.registered)
        peers.held = version
        if peers.after_announce:
            peers.after_announce()
        await peers.tell()
        return agent_pb2.AnnounceVersionResponse(incarnation=me)

    async def WaitRead(self, request: Any, context: Any) -> agent_pb2.WaitReadResponse:
        peers = self.peers
        held = peers.held
        read = held is not None and (held.run_epoch, held.step) >= (request.version.run_epoch, request.version.step)
        return agent_pb2.WaitReadResponse(read=read, version=held, incarnation=peers.incarnation)


class FakeCoordinator(weight_sync_pb2_grpc.WeightSyncServiceServicer):
    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    async def PublishVersion(self, request: Any, context: Any) -> weight_sync_pb2.PublishVersionResponse:
        version = request.version.run_epoch, request.version.step
        if self.peers.refuse_publish:
            raise Aborted(self.peers.refuse_publish)
        if version not in self.peers.published:
            self.peers.published.append(version)
        await self.peers.tell()
        return weight_sync_pb2.PublishVersionResponse()


async def serve_peers(peers: Peers, ports: Mapping[str, int]) -> list[grpc.aio.Server]:
    """One server each for buffer, agent and weight_sync, on loopback; `serve_agent` adds agents of more ranks."""
    servers = {name: make_server() for name in ("buffer", "agent", "weight_sync")}
    classes: list[Any] = [FakeBuffer, FakeRegistry, FakeAgent, FakeCoordinator]  # each has the methods in use only
    fakes = [fake(peers) for fake in classes]
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(fakes[0], servers["buffer"])
    registry_pb2_grpc.add_RunRegistryServiceServicer_to_server(fakes[1], servers["buffer"])
    agent_pb2_grpc.add_WeightAgentServiceServicer_to_server(fakes[2], servers["agent"])
    weight_sync_pb2_grpc.add_WeightSyncServiceServicer_to_server(fakes[3], servers["weight_sync"])
    for name, server in servers.items():
        bind_server(server, "127.0.0.1", ports[name])
        await server.start()
    return list(servers.values())


async def serve_agent(peers: Peers, port: int) -> grpc.aio.Server:
    """The agent of another rank, with a state of its own."""
    server, agent = make_server(), cast(Any, FakeAgent)(peers)
    agent_pb2_grpc.add_WeightAgentServiceServicer_to_server(agent, server)
    bind_server(server, "127.0.0.1", port)
    await server.start()
    return server
