"""Agent and coordinator as real processes, real shared memory, gRPC and gloo; they are killed on the way.

Registry and gateway are scripted; the engine is this test around the real receiving end, with a loader in vLLM's place.
"""

# ruff: noqa: ASYNC110
# pyright: reportAbstractUsage=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from flotilla.buffer.v1 import registry_pb2, registry_pb2_grpc
from flotilla.rollout_gateway.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from flotilla.weight_sync.v1 import agent_pb2, agent_pb2_grpc, weight_sync_pb2, weight_sync_pb2_grpc
from services.common.errors import Aborted
from services.common.rpc import bind_server, call, duration, make_server, open_channel
from services.weight_sync import codec
from services.weight_sync.reception import Reception
from services.weight_sync.records import PolicyVersion, ShardSlice
from tests import weight_sync_oracles as oracle
from tests.conftest import free_ports
from tests.weight_sync_fleet import make_spec
from tests.weight_sync_peers import Gateway, Registry, proto

LIVE = registry_pb2.VERSION_STATE_LIVE
WAIT_S = 60.0
POLL_S = 0.005
SHAPES = {"embed": (320, 128), **{f"layers.{i}.up": (512, 384) for i in range(5)}, "norm": (128,)}
"""About a million parameters."""


class ReceivingEngine(engine_pb2_grpc.EngineServiceServicer):
    """An engine without generation."""

    def __init__(self) -> None:
        self.reception: Reception | None = None
        self.loaded: dict[str, torch.Tensor] = {}
        self.finished = 0

    async def GetParameterManifest(self, request, context):
        parameters = [
            engine_pb2.ManifestParameter(name=n, shape=s, dtype="float32", quantisable=n.startswith("layers"))
            for n, s in SHAPES.items()
        ]
        return engine_pb2.GetParameterManifestResponse(parameters=parameters)

    async def StartWeightUpdate(self, request, context):
        if self.reception is not None:
            self.reception.abort()
        self.reception = Reception(request, 0, torch.device("cpu"))
        return engine_pb2.StartWeightUpdateResponse()

    async def ReceiveWeights(self, request, context):
        current = self.reception
        assert current is not None
        while current.poll()["state"] == "receiving":
            await asyncio.sleep(POLL_S)
        poll = current.poll()
        if poll["state"] == "failed":
            raise Aborted(poll["error"])
        return engine_pb2.ReceiveWeightsResponse(digests=[poll["digest"]], wire_seconds=poll["wire_seconds"])

    async def FinishWeightUpdate(self, request, context):
        assert self.reception is not None
        self.reception.load(self.reload, torch.float32)
        self.finished += 1
        return engine_pb2.FinishWeightUpdateResponse(load_seconds=0.01, pause_seconds=0.01)

    async def AbortWeightUpdate(self, request, context):
        if self.reception is not None:
            self.reception.abort()
        return engine_pb2.AbortWeightUpdateResponse()

    def reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.loaded = {name: x.clone() for name, x in tensors}


class Fleet:
    """The processes, and what stands around them."""

    def __init__(self, base: Path) -> None:
        ports = free_ports(8)
        self.registry, self.gateway, self.engine = Registry(), Gateway(), ReceivingEngine()
        settings = {"session_timeout_s": 20, "bucket_bytes": 500_000}
        self.spec = make_spec(base, ports, {"run_id": "test", "weight_sync": settings})
        self.run_file = base / "run.toml"
        self.run_file.write_text(self.spec.to_toml())
        self.engine_address = f"127.0.0.1:{ports[6]}"
        handle, name = tempfile.mkstemp(prefix="flotilla-test-", dir="/dev/shm")
        os.close(handle)
        self.memory = Path(name)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._servers: list[grpc.aio.Server] = []
        self._ports = ports

    async def start(self) -> None:
        await self._serve(0, self.registry, registry_pb2_grpc.add_RunRegistryServiceServicer_to_server)
        await self._serve(1, self.gateway, gateway_pb2_grpc.add_RolloutGatewayServiceServicer_to_server)
        await self._serve(6, self.engine, engine_pb2_grpc.add_EngineServiceServicer_to_server)
        await self.list_engine("1")
        self._channels = [open_channel(f"127.0.0.1:{self._ports[i]}") for i in (2, 4)]
        self.agent = agent_pb2_grpc.WeightAgentServiceStub(self._channels[0])
        self.coordinator = weight_sync_pb2_grpc.WeightSyncServiceStub(self._channels[1])
        for module in ("services.weight_sync.agent", "services.weight_sync"):
            self.spawn(module)

    def spawn(self, module: str) -> None:
        rank = ["--rank", "0"] if module.endswith("agent") else []
        command = [sys.executable, "-m", module, "--run", str(self.run_file), *rank]
        self.processes[module] = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})

    async def kill(self, module: str) -> None:
        self.processes[module].kill()
        await asyncio.to_thread(self.processes[module].wait)

    async def list_engine(self, incarnation: str) -> None:
        engine = gateway_pb2.Engine(
            engine_id="e0", incarnation=incarnation, address=self.engine_address, worker_count=1
        )
        await self.gateway.put("e0", engine)

    def write(self, seed: int) -> dict[str, torch.Tensor]:
        """New weights, in place, as a trainer's step leaves them."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        with self.memory.open("r+b") as file:
            file.write(b"".join(x.numpy().tobytes() for x in tensors.values()))
        return tensors

    async def announce(self, version: PolicyVersion) -> None:
        """What the trainer's heartbeat does, until the agent has read the version."""
        slices, offset = [], 0
        for name, shape in SHAPES.items():
            x = torch.empty(shape)
            slices.append(ShardSlice(name, shape, (0,) * len(shape), shape, "float32", offset, x.stride()))
            offset += x.nbytes
        register = agent_pb2.RegisterShardsRequest(
            run_id="test",
            shared_memory_path=str(self.memory),
            shared_memory_bytes=offset,
            slices=[codec.slice_to_proto(one) for one in slices],
        )
        await call(self.agent.RegisterShards, register, timeout_s=5, patience_s=WAIT_S)
        note = agent_pb2.AnnounceVersionRequest(run_id="test", version=proto(version))
        await call(self.agent.AnnounceVersion, note, timeout_s=5)
        wait = agent_pb2.WaitReadRequest(run_id="test", version=proto(version), wait_timeout=duration(20))
        assert (await call(self.agent.WaitRead, wait, timeout_s=25)).read

    async def publish(self, version: PolicyVersion) -> None:
        request = weight_sync_pb2.PublishVersionRequest(run_id="test", version=proto(version))
        await call(self.coordinator.PublishVersion, request, timeout_s=5, patience_s=WAIT_S)

    async def until(self, reached: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not reached():
                await asyncio.sleep(POLL_S)

    async def until_live(self, version: PolicyVersion) -> None:
        await self.until(lambda: (version, LIVE) in self.registry.records)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.spec.run_dir / "weight_sync.jsonl").read_text().splitlines()]

    async def stop(self) -> dict[str, int]:
        """Exit statuses after SIGTERM."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        statuses = {m: await asyncio.to_thread(p.wait, 20) for m, p in self.processes.items()}
        for channel in self._channels:
            await channel.close()
        for server in self._servers:
            await server.stop(None)
        self.memory.unlink()
        return statuses

    async def _serve(self, port: int, servicer: object, add: Callable[[Any, grpc.aio.Server], None]) -> None:
        server = make_server()
        add(servicer, server)
        bind_server(server, "127.0.0.1", self._ports[port])
        await server.start()
        self._servers.append(server)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path)
    await made.start()
    yield made
    assert set((await made.stop()).values()) == {0}, "SIGTERM ends a process in order"


def assert_loaded(fleet: Fleet, tensors: dict[str, torch.Tensor]) -> None:
    for name, x in tensors.items():
        plain = not name.startswith("layers")
        expected = x if plain else torch.from_numpy(oracle.dequantize(*oracle.quantize(x.numpy())))
        assert fleet.engine.loaded[name].equal(expected), name


async def test_versions_one_after_the_other(fleet):
    times = []
    for step in range(6):
        version = PolicyVersion(1, step)
        tensors = fleet.write(step)
        await fleet.announce(version)
        fleet.write(100)  # the trainer goes on at once
        begun = time.monotonic()
        await fleet.publish(version)
        await fleet.until_live(version)
        times.append(time.monotonic() - begun)
        assert_loaded(fleet, tensors)
    print("publish to live, seconds:", [round(one, 3) for one in times])
    for row in fleet.rows():
        assert row["equal"] and row["receiver_digests"] == [row["sender_digest"]]
        assert row["wire_bytes"] < 0.5 * row["plain_bytes"]
    print(json.dumps(fleet.rows()[-1]))


async def test_killed_agent_and_coordinator_recover(fleet):
    version = PolicyVersion(1, 0)
    tensors = fleet.write(0)
    await fleet.announce(version)
    await fleet.publish(version)
    await fleet.until_live(version)

    await fleet.kill("services.weight_sync.agent")
    await fleet.list_engine("2")  # an engine that needs the version while the agent is away
    fleet.spawn("services.weight_sync.agent")
    await fleet.announce(version)
    await fleet.until(lambda: fleet.engine.finished == 2)
    assert_loaded(fleet, tensors)

    await fleet.kill("services.weight_sync")
    fleet.registry.versions = [registry_pb2.Version(version=proto(version), state=LIVE)]
    await fleet.list_engine("3")
    fleet.spawn("services.weight_sync")
    await fleet.until(lambda: fleet.engine.finished == 3)
    assert fleet.registry.records.count((version, LIVE)) == 1
