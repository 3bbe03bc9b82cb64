"""How a policy version goes live where no weights move: the registry hears of it, and of every engine that takes it."""

from __future__ import annotations

import asyncio
from typing import Any

from flotilla.buffer.v1 import registry_pb2, registry_pb2_grpc
from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import gateway_pb2, gateway_pb2_grpc
from services.common.board import StatusBoard
from services.common.rpc import duration, new_request_id
from services.trainer.insist import insist

POLL_S = 5.0
PUBLISH_S = 120.0
"""Longer than any kill in a test keeps the gateway without an engine."""


class Versions:
    """Of one run."""

    def __init__(self, run_id: str, board: StatusBoard, buffer_channel: Any, gateway_channel: Any) -> None:
        self._run_id, self._board = run_id, board
        self._registry = registry_pb2_grpc.RunRegistryServiceStub(buffer_channel)
        self._gateway = gateway_pb2_grpc.RolloutGatewayServiceStub(gateway_channel)

    async def publish(self, version: common_pb2.PolicyVersion) -> None:
        """Return once a version is LIVE: every engine that the gateway knows serves it."""
        await self._record(version, registry_pb2.VERSION_STATE_PUBLISHING)
        async with asyncio.timeout(PUBLISH_S):
            revision = 0
            while True:
                request = gateway_pb2.ListEnginesRequest(
                    run_id=self._run_id, known_revision=revision, wait_timeout=duration(POLL_S)
                )
                found = await self._ask(self._gateway.ListEngines, request, poll_s=POLL_S)
                if found.engines and all(engine.version == version for engine in found.engines):
                    break
                revision = found.revision
        await self._record(version, registry_pb2.VERSION_STATE_LIVE)

    async def _record(self, version: common_pb2.PolicyVersion, state: registry_pb2.VersionState) -> None:
        record = registry_pb2.Version(version=version, state=state)
        request = registry_pb2.RecordVersionRequest(run_id=self._run_id, request_id=new_request_id(), version=record)
        await self._ask(self._registry.RecordVersion, request)

    async def _ask(self, method: Any, request: Any, poll_s: float = 0.0) -> Any:
        return await insist(self._board, "a peer", method, request, poll_s=poll_s)
