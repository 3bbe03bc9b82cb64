"""`python -m services.weight_sync --run RUN.toml`: the coordinator."""

from __future__ import annotations

from flotilla.weight_sync.v1 import weight_sync_pb2_grpc
from services.common.service import ServiceHost, run_service
from services.weight_sync.coordinator import Coordinator
from services.weight_sync.peers import Peers
from services.weight_sync.servicer import WeightSyncServicer, status_to_summary

WEIGHT_SYNC_SERVICE = "flotilla.weight_sync.v1.WeightSyncService"


async def setup(host: ServiceHost) -> None:
    """Take up what the registry knows, then serve and reconcile."""
    peers = Peers(host.spec.services)
    host.on_stop.append(peers.close)
    coordinator = Coordinator(host.spec, peers, host.board)
    host.board.details = lambda: status_to_summary(coordinator.status())
    await coordinator.recover()
    host.serve(
        WEIGHT_SYNC_SERVICE,
        weight_sync_pb2_grpc.add_WeightSyncServiceServicer_to_server,
        WeightSyncServicer(host.spec.run_id, coordinator),
    )
    host.spawn(coordinator.watch_engines(), "watch engines")
    host.spawn(coordinator.run(), "reconcile")


if __name__ == "__main__":
    run_service("weight_sync", setup, lambda spec: spec.services.weight_sync)
