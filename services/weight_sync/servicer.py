"""The gRPC side of the coordinator."""

from __future__ import annotations

from typing import Any

from flotilla.weight_sync.v1 import weight_sync_pb2, weight_sync_pb2_grpc
from services.common.errors import InvalidArgument, NotFound
from services.weight_sync import codec
from services.weight_sync.coordinator import Coordinator, Failures, Status
from services.weight_sync.peers import Engine


class WeightSyncServicer(weight_sync_pb2_grpc.WeightSyncServiceServicer):
    """WeightSyncService over a coordinator."""

    def __init__(self, run_id: str, coordinator: Coordinator) -> None:
        self._run_id, self._coordinator = run_id, coordinator

    async def PublishVersion(
        self, request: weight_sync_pb2.PublishVersionRequest, context: Any
    ) -> weight_sync_pb2.PublishVersionResponse:
        """Note the target."""
        self._check_run(request.run_id)
        if not request.HasField("version"):
            raise InvalidArgument("name the version to publish", field="version")
        self._coordinator.publish(codec.version_from_proto(request.version))
        return weight_sync_pb2.PublishVersionResponse()

    async def GetSyncStatus(
        self, request: weight_sync_pb2.GetSyncStatusRequest, context: Any
    ) -> weight_sync_pb2.GetSyncStatusResponse:
        """How it stands."""
        self._check_run(request.run_id)
        return status_to_proto(self._coordinator.status())

    async def GetTransferPlan(
        self, request: weight_sync_pb2.GetTransferPlanRequest, context: Any
    ) -> weight_sync_pb2.GetTransferPlanResponse:
        """The last plan."""
        self._check_run(request.run_id)
        plan = self._coordinator.plan()
        if plan is None:
            raise NotFound("no transfer has been planned yet")
        return weight_sync_pb2.GetTransferPlanResponse(
            buckets=codec.buckets_to_proto(plan.buckets), wire_bytes=plan.wire_bytes, plain_bytes=plan.plain_bytes
        )

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise NotFound(f"this coordinator serves run {self._run_id}, not {run_id}")


def status_to_proto(status: Status) -> weight_sync_pb2.GetSyncStatusResponse:
    """As it travels."""
    response = weight_sync_pb2.GetSyncStatusResponse(
        settled=status.settled,
        engines=[_engine_to_proto(engine, status.failures.get(engine.engine_id)) for engine in status.engines],
        sessions=status.sessions,
        digest_mismatches=status.digest_mismatches,
    )
    if status.target is not None:
        response.target.CopyFrom(codec.version_to_proto(status.target))
    return response


def _engine_to_proto(engine: Engine, failures: Failures | None) -> weight_sync_pb2.EngineSync:
    failures = failures or Failures()
    message = weight_sync_pb2.EngineSync(
        engine_id=engine.engine_id, failures=failures.count, last_error=failures.last_error
    )
    if engine.version is not None:
        message.version.CopyFrom(codec.version_to_proto(engine.version))
    return message


def status_to_summary(status: Status) -> dict[str, Any]:
    """For /statusz."""
    return {
        "target": str(status.target or ""),
        "settled": status.settled,
        "engines": {engine.engine_id: str(engine.version or "") for engine in status.engines},
        "sessions": status.sessions,
        "digest_mismatches": status.digest_mismatches,
    }
