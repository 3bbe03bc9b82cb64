"""`python -m tests.chaos.weight_sync --run RUN.toml`: weight agent and coordinator that move no weights, for tests.

The agent reads a version as soon as it is announced, and notes the SHA-256 of what it read in `published.jsonl`. A
version that is published goes live as soon as every engine has taken its number (`tests.chaos.engine`).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

from flotilla.common.v1 import common_pb2
from flotilla.weight_sync.v1 import agent_pb2, agent_pb2_grpc, weight_sync_pb2, weight_sync_pb2_grpc
from services.common.board import StatusBoard
from services.common.errors import Aborted, FailedPrecondition
from services.common.logs import get_logger, setup_logging
from services.common.rpc import bind_server, make_server, open_channel
from services.common.service import die_with_parent
from services.common.spec import RunSpec, load_run
from tests.chaos.versions import Versions

PUBLISHED = "published.jsonl"
log = get_logger(__name__)


class Agent(agent_pb2_grpc.WeightAgentServiceServicer):
    """Beside the one rank."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / PUBLISHED
        self._incarnation = uuid.uuid4().hex
        self._memory: Path | None = None
        self._read = common_pb2.PolicyVersion()

    async def RegisterShards(self, request: Any, context: Any) -> agent_pb2.RegisterShardsResponse:
        """Know where to read."""
        self._memory = Path(request.shared_memory_path)
        return agent_pb2.RegisterShardsResponse(incarnation=self._incarnation)

    async def AnnounceVersion(self, request: Any, context: Any) -> agent_pb2.AnnounceVersionResponse:
        """Read it."""
        if self._memory is None:
            raise FailedPrecondition("register the shards first")
        self._read = request.version
        digest = hashlib.sha256(self._memory.read_bytes()).hexdigest()
        line = {"run_epoch": self._read.run_epoch, "step": self._read.step, "digest": digest}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return agent_pb2.AnnounceVersionResponse(incarnation=self._incarnation)

    async def WaitRead(self, request: Any, context: Any) -> agent_pb2.WaitReadResponse:
        """Say what was read last."""
        ours, wanted = ((one.run_epoch, one.step) for one in (self._read, request.version))
        return agent_pb2.WaitReadResponse(read=ours >= wanted, version=self._read, incarnation=self._incarnation)


class Coordinator(weight_sync_pb2_grpc.WeightSyncServiceServicer):
    """Publishes one version at a time; a newer one supersedes it."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._newest = 0, 0
        self._publishing: asyncio.Task[None] | None = None

    async def PublishVersion(self, request: Any, context: Any) -> weight_sync_pb2.PublishVersionResponse:
        """Begin with it; the trainer waits for no engine."""
        version = request.version.run_epoch, request.version.step
        if version > self._newest:
            self._newest = version
            if self._publishing:
                self._publishing.cancel()
            self._publishing = asyncio.create_task(self._publish(request.version))
        return weight_sync_pb2.PublishVersionResponse()

    async def _publish(self, version: common_pb2.PolicyVersion) -> None:
        try:
            await self._versions.publish(version)
        except Aborted as error:
            log.info("the version belongs to an old epoch", error=str(error))


async def serve(spec: RunSpec) -> None:
    """Until a signal."""
    at, board = spec.services, StatusBoard("weight_sync")
    async with open_channel(at.buffer.grpc) as buffer, open_channel(at.rollout_gateway.grpc) as gateway:
        server = make_server()
        classes: list[Any] = [Coordinator, Agent]  # each has the methods in use only
        coordinator, agent = classes[0](Versions(spec.run_id, board, buffer, gateway)), classes[1](spec.run_dir)
        weight_sync_pb2_grpc.add_WeightSyncServiceServicer_to_server(coordinator, server)
        agent_pb2_grpc.add_WeightAgentServiceServicer_to_server(agent, server)
        for endpoint in (at.weight_sync, at.weight_agents[0]):
            bind_server(server, endpoint.bind, endpoint.grpc_port)
        await server.start()
        await server.wait_for_termination()


def main() -> None:
    """Run until a signal."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.weight_sync")
    parser.add_argument("--run", type=Path, required=True, help="run spec (TOML)")
    spec = load_run(parser.parse_args().run)
    die_with_parent()
    setup_logging("weight_sync", spec.run_id)
    asyncio.run(serve(spec))


if __name__ == "__main__":
    main()
