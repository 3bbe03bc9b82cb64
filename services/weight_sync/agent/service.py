"""The gRPC side of the agent.

RegisterShards and AnnounceVersion come from the trainer, repeated by its heartbeat; WaitRead answers the trainer, which
then goes on, and the coordinator; RunTransfer and AbortTransfer come from the coordinator.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from flotilla.weight_sync.v1 import agent_pb2, agent_pb2_grpc
from services.common.errors import InvalidArgument, NotFound
from services.common.rpc import seconds
from services.common.service import ServiceHost
from services.weight_sync import codec
from services.weight_sync.agent.holder import Holder
from services.weight_sync.agent.memory import Registration, map_cuda_memory, map_memory
from services.weight_sync.agent.sender import Sender, TransferOrder
from services.weight_sync.transport import serve_store

AGENT_SERVICE = "flotilla.weight_sync.v1.WeightAgentService"
LONGEST_WAIT_S = 60.0
"""A long poll that asks for more answers after it, and is repeated."""


class AgentServicer(agent_pb2_grpc.WeightAgentServiceServicer):
    """WeightAgentService over a holder and a sender."""

    def __init__(self, run_id: str, agent_count: int, rendezvous: str, holder: Holder, sender: Sender) -> None:
        self._run_id, self._agent_count, self._rendezvous = run_id, agent_count, rendezvous
        self._holder, self._sender = holder, sender

    async def RegisterShards(
        self, request: agent_pb2.RegisterShardsRequest, context: Any
    ) -> agent_pb2.RegisterShardsResponse:
        """Map the memory of the trainer."""
        self._check_run(request.run_id)
        self._holder.register(await asyncio.to_thread(map_registered, request))
        return agent_pb2.RegisterShardsResponse(incarnation=self._holder.incarnation)

    async def AnnounceVersion(
        self, request: agent_pb2.AnnounceVersionRequest, context: Any
    ) -> agent_pb2.AnnounceVersionResponse:
        """Begin to read."""
        self._check_run(request.run_id)
        if not request.HasField("version"):
            raise InvalidArgument("name the version that the memory holds", field="version")
        self._holder.announce(codec.version_from_proto(request.version))
        return agent_pb2.AnnounceVersionResponse(incarnation=self._holder.incarnation)

    async def WaitRead(self, request: agent_pb2.WaitReadRequest, context: Any) -> agent_pb2.WaitReadResponse:
        """Wait until a version is read."""
        self._check_run(request.run_id)
        version = codec.version_from_proto(request.version) if request.HasField("version") else None
        held = await self._holder.wait_read(version, min(seconds(request.wait_timeout), LONGEST_WAIT_S))
        response = agent_pb2.WaitReadResponse(rendezvous_address=self._rendezvous, incarnation=self._holder.incarnation)
        if held is not None:
            response.read = version is None or held.version >= version
            response.version.CopyFrom(codec.version_to_proto(held.version))
            response.slices.extend(codec.slice_to_proto(one) for one in held.slices)
            response.read_quantise_seconds = held.read_quantise_seconds
        return response

    async def RunTransfer(self, request: agent_pb2.RunTransferRequest, context: Any) -> agent_pb2.RunTransferResponse:
        """Send; a caller that gives up ends the session."""
        self._check_run(request.run_id)
        order = self._order(request)
        held = self._holder.use(codec.version_from_proto(request.version), order.buckets)
        try:
            sent = await self._sender.run(order, held)
        except asyncio.CancelledError:
            await self._sender.abort(request.session_id)
            raise
        return agent_pb2.RunTransferResponse(
            digest=sent.digest, wire_seconds=sent.wire_seconds, connect_seconds=sent.connect_seconds
        )

    async def AbortTransfer(
        self, request: agent_pb2.AbortTransferRequest, context: Any
    ) -> agent_pb2.AbortTransferResponse:
        """Cut a session short."""
        self._check_run(request.run_id)
        await self._sender.abort(request.session_id)
        return agent_pb2.AbortTransferResponse()

    def _order(self, request: agent_pb2.RunTransferRequest) -> TransferOrder:
        buckets = codec.buckets_from_proto(request.buckets)
        return TransferOrder(
            session_id=request.session_id,
            rendezvous=request.rendezvous_address,
            rank=request.rank,
            world_size=request.world_size,
            receivers=range(self._agent_count, request.world_size),
            buckets=tuple(bucket for bucket in buckets if bucket.source_rank == request.rank),
            timeout_s=seconds(request.session_timeout),
        )

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise NotFound(f"this agent serves run {self._run_id}, not {run_id}")


def map_registered(request: agent_pb2.RegisterShardsRequest) -> Registration:
    """Map the memory that a trainer registers; raises as `map_memory` and `map_cuda_memory`."""
    slices = [codec.slice_from_proto(one) for one in request.slices]
    if request.HasField("cuda_memory") == bool(request.shared_memory_path):
        raise InvalidArgument("name either shared memory or memory of a GPU", field="shared_memory_path")
    if request.HasField("cuda_memory"):
        return map_cuda_memory(codec.cuda_memory_from_proto(request.cuda_memory), slices)
    return map_memory(request.shared_memory_path, request.shared_memory_bytes, slices)


async def setup_agent(host: ServiceHost) -> None:
    """Serve WeightAgentService; the store where sessions meet lives as long as the process."""
    store = serve_store(host.endpoint.bind)
    rendezvous = f"{host.endpoint.host}:{store.port}"
    holder = Holder(host.fail)
    sender = Sender(torch.device("cuda" if torch.cuda.is_available() else "cpu"), host.fail)
    host.on_stop.append(sender.close)
    agent_count = len(host.spec.services.weight_agents)
    servicer = AgentServicer(host.spec.run_id, agent_count, rendezvous, holder, sender)
    host.serve(AGENT_SERVICE, agent_pb2_grpc.add_WeightAgentServiceServicer_to_server, servicer)
    host.board.details = lambda: {"version": str(holder.held.version) if holder.held else "", "rendezvous": store.port}
