"""Tells the weight_sync coordinator which policy version to bring to the engines. On rank 0."""

from __future__ import annotations

import asyncio

import grpc

from flotilla.common.v1 import common_pb2
from flotilla.weight_sync.v1 import weight_sync_pb2, weight_sync_pb2_grpc
from services.common.board import StatusBoard
from services.common.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from services.common.logs import get_logger
from services.common.rpc import call, new_request_id
from services.trainer.insist import ATTEMPT_S, HEARTBEAT_S, insist

log = get_logger(__name__)


class Publisher:
    """The coordinator. Used from one event loop."""

    def __init__(self, run_id: str, board: StatusBoard, coordinator: grpc.aio.Channel) -> None:
        self._run_id, self._board = run_id, board
        self._coordinator = weight_sync_pb2_grpc.WeightSyncServiceStub(coordinator)
        self._published: common_pb2.PolicyVersion | None = None

    async def publish(self, version: common_pb2.PolicyVersion) -> None:
        """Publish a version that the agents of all ranks have read.

        Raises:
            Aborted: Another trainer runs.
            DeadlineExceeded, Unavailable: The coordinator stayed away.
        """
        method, request = self._coordinator.PublishVersion, self._request(version)
        await insist(self._board, "the weight_sync coordinator", method, request)
        self._published = version

    async def beat(self) -> None:
        """Tell a restarted coordinator, for the life of the process. Raises Aborted if another trainer runs."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._published is None:
                continue
            try:
                await call(self._coordinator.PublishVersion, self._request(self._published), timeout_s=ATTEMPT_S)
            except (Unavailable, DeadlineExceeded, FailedPrecondition) as error:
                log.info("the coordinator is away; the heartbeat will tell it later", error=str(error))

    def _request(self, version: common_pb2.PolicyVersion) -> weight_sync_pb2.PublishVersionRequest:
        return weight_sync_pb2.PublishVersionRequest(run_id=self._run_id, request_id=new_request_id(), version=version)
