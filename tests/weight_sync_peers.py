"""Scripted stand-ins for the peers of weight_sync, to be served behind real gRPC."""

# pyright: reportAbstractUsage=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio

from flotilla.buffer.v1 import registry_pb2, registry_pb2_grpc
from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import gateway_pb2, gateway_pb2_grpc
from services.common.errors import FlotillaError
from services.common.rpc import seconds
from services.weight_sync.records import PolicyVersion


def proto(version: PolicyVersion) -> common_pb2.PolicyVersion:
    return common_pb2.PolicyVersion(run_epoch=version.run_epoch, step=version.step)


class Registry(registry_pb2_grpc.RunRegistryServiceServicer):
    def __init__(self) -> None:
        self.epoch = 1
        self.records: list[tuple[PolicyVersion, int]] = []
        self.versions: list[registry_pb2.Version] = []
        self.answers: list[FlotillaError] = []
        self.last: registry_pb2.Version | None = None

    async def RegisterRun(self, request, context):
        return registry_pb2.RegisterRunResponse(run=registry_pb2.Run(run_id="test", run_epoch=self.epoch))

    async def ListVersions(self, request, context):
        return registry_pb2.ListVersionsResponse(versions=self.versions)

    async def RecordVersion(self, request, context):
        if self.answers:
            raise self.answers.pop(0)
        version = request.version.version
        self.records.append((PolicyVersion(version.run_epoch, version.step), request.version.state))
        self.last = request.version
        return registry_pb2.RecordVersionResponse()


class Gateway(gateway_pb2_grpc.RolloutGatewayServiceServicer):
    def __init__(self) -> None:
        self.engines: dict[str, gateway_pb2.Engine] = {}
        self.revision = 1
        self._changed = asyncio.Condition()

    async def put(self, engine_id: str, engine: gateway_pb2.Engine | None) -> None:
        self.engines.pop(engine_id, None)
        if engine is not None:
            self.engines[engine_id] = engine
        self.revision += 1
        async with self._changed:
            self._changed.notify_all()

    async def RegisterEngine(self, request, context):
        await self.put(request.engine.engine_id, request.engine)
        return gateway_pb2.RegisterEngineResponse()

    async def RenewEngine(self, request, context):
        return gateway_pb2.RenewEngineResponse()

    async def ListEngines(self, request, context):
        async with self._changed:
            try:
                async with asyncio.timeout(seconds(request.wait_timeout)):
                    await self._changed.wait_for(lambda: self.revision != request.known_revision)
            except TimeoutError:
                pass
        return gateway_pb2.ListEnginesResponse(engines=self.engines.values(), revision=self.revision)
