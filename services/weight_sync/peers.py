"""Whom the coordinator talks to: the run registry, the gateway, the agents, and engines as they come and go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from flotilla.buffer.v1.registry_pb2_grpc import RunRegistryServiceStub
from flotilla.rollout_gateway.v1 import gateway_pb2
from flotilla.rollout_gateway.v1.engine_pb2_grpc import EngineServiceStub
from flotilla.rollout_gateway.v1.gateway_pb2_grpc import RolloutGatewayServiceStub
from flotilla.weight_sync.v1.agent_pb2_grpc import WeightAgentServiceStub
from services.common.rpc import open_channel
from services.common.spec import ServicesSpec
from services.weight_sync import codec
from services.weight_sync.records import PolicyVersion

if TYPE_CHECKING:
    from flotilla.rollout_gateway.v1.engine_pb2_grpc import EngineServiceAsyncStub


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as the gateway lists it."""

    engine_id: str
    incarnation: str
    address: str
    worker_count: int
    version: PolicyVersion | None

    @property
    def start(self) -> tuple[str, str]:
        """Names one start of the engine's process."""
        return self.engine_id, self.incarnation


def engine_from_proto(message: gateway_pb2.Engine) -> Engine:
    """As the gateway says."""
    version = codec.version_from_proto(message.version) if message.HasField("version") else None
    return Engine(message.engine_id, message.incarnation, message.address, message.worker_count, version)


class Peers:
    """Channels, made once each, inside the event loop that uses them."""

    def __init__(self, services: ServicesSpec) -> None:
        self._channels: list[grpc.aio.Channel] = []
        self._engines: dict[str, grpc.aio.Channel] = {}
        self.registry = RunRegistryServiceStub(self._open(services.buffer.grpc))
        self.gateway = RolloutGatewayServiceStub(self._open(services.rollout_gateway.grpc))
        self.agents = [WeightAgentServiceStub(self._open(agent.grpc)) for agent in services.weight_agents]

    def engine(self, address: str) -> EngineServiceAsyncStub:
        """The engine at an address."""
        if address not in self._engines:
            self._engines[address] = open_channel(address)
        return EngineServiceStub(self._engines[address])

    async def forget_engines(self, known: Collection[str]) -> None:
        """Close the channels to engines at other addresses."""
        for address in set(self._engines) - set(known):
            await self._engines.pop(address).close()

    async def close(self) -> None:
        """Close every channel."""
        for channel in [*self._channels, *self._engines.values()]:
            await channel.close()

    def _open(self, target: str) -> grpc.aio.Channel:
        channel = open_channel(target)
        self._channels.append(channel)
        return channel
