"""Agent and coordinator as real processes, between stand-ins for trainer and engine that are processes too.

Registry and gateway are scripted and live in the process of the test.
"""

# pyright: reportAbstractUsage=false

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc

from flotilla.buffer.v1 import registry_pb2, registry_pb2_grpc
from flotilla.rollout_gateway.v1 import gateway_pb2, gateway_pb2_grpc
from flotilla.weight_sync.v1 import weight_sync_pb2, weight_sync_pb2_grpc
from services.common.rpc import bind_server, call, make_server, open_channel
from services.common.spec import RunSpec
from services.weight_sync.records import PolicyVersion
from tests.conftest import free_ports
from tests.weight_sync_peers import Gateway, Registry

STAND_IN = "tests.weight_sync_stand_ins"
AGENT, COORDINATOR = "services.weight_sync.agent", "services.weight_sync"
LIVE = registry_pb2.VERSION_STATE_LIVE
POLL_S, END_S = 0.005, 15.0
Shapes = Mapping[str, tuple[int, ...]]


class Process:
    """A stand-in, as the test sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, line: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()
        return await self.hear()

    async def hear(self, key: str = "") -> dict[str, Any]:
        """The next thing that it says, or the next with a key; what is no JSON is passed on."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            try:
                said = json.loads(line)
            except ValueError:
                sys.stderr.write(line.decode())
                continue
            if key in said or not key:
                return said
        raise AssertionError(f"a stand-in ended with {await self.process.wait()}")

    async def end(self) -> None:
        """In order, if it obeys."""
        with suppress(ProcessLookupError):
            self.process.terminate()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), END_S)
        await self.kill()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


async def start(gpus: str, module: str, *arguments: str, log: Path | None = None) -> Process:
    """Start a module that sees some GPUs; what it prints goes to the test, or to a file."""
    with log.open("wb") if log else nullcontext() as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "4"},
            stdin=PIPE,
            stdout=PIPE if module == STAND_IN else file,
            stderr=file,
        )
    return Process(process)


class Fleet:
    """The processes, and what stands around them; every call within the deadline of the test."""

    def __init__(
        self,
        folder: Path,
        shapes: Shapes,
        *,
        trainer_gpus: str,
        engine_gpus: str,
        **sections: Any,
    ) -> None:
        """Prepare.

        Args:
            folder: For the run file and its directory.
            shapes: Of the model.
            trainer_gpus, engine_gpus: CUDA_VISIBLE_DEVICES of trainer and agent, and of the engine.
            sections: Of the run spec.
        """
        self._ports = free_ports(8)
        self.registry, self.gateway = Registry(), Gateway()
        self._gpus = {"trainer": trainer_gpus, AGENT: trainer_gpus, COORDINATOR: "", "engine": engine_gpus}
        self.spec = make_spec(folder, self._ports, sections)
        self.run_file, self._shape_file = folder / "run.toml", folder / "shapes.json"
        self.run_file.write_text(self.spec.to_toml())
        self._shape_file.write_text(json.dumps(shapes))
        self.services: dict[str, Process] = {}
        self._servers: list[grpc.aio.Server] = []
        self._processes: list[Process] = []

    async def __aenter__(self) -> Fleet:
        add = registry_pb2_grpc.add_RunRegistryServiceServicer_to_server
        self._servers.append(await serve(self.registry, add, self._ports[0]))
        add = gateway_pb2_grpc.add_RolloutGatewayServiceServicer_to_server
        self._servers.append(await serve(self.gateway, add, self._ports[1]))
        await self.start_service(AGENT)
        await self.start_service(COORDINATOR)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            await process.kill()
        for server in self._servers:
            await server.stop(None)

    async def start_service(self, module: str) -> None:
        rank = ["--rank", "0"] if module == AGENT else []
        self.services[module] = await self._start(module, module, "--run", str(self.run_file), *rank)

    async def trainer(self, epoch: int = 1) -> Process:
        return await self._stand_in("trainer", "--epoch", str(epoch))

    async def engine(self, incarnation: str = "1", *options: str) -> Process:
        """Start and list one."""
        process = await self._stand_in("engine", "--port", str(self._ports[6]), *options)
        await self.list_engine(f"127.0.0.1:{self._ports[6]}", incarnation)
        return process

    async def list_engine(self, address: str, incarnation: str) -> None:
        engine = gateway_pb2.Engine(engine_id="engine-0", incarnation=incarnation, address=address, worker_count=1)
        await self.gateway.put("engine-0", engine)

    async def until(self, reached: Callable[[], Any]) -> None:
        """Wait, while agent and coordinator live."""
        while not reached():
            for name, one in self.services.items():
                assert one.process.returncode is None, f"{name} ended with {one.process.returncode}"
            await asyncio.sleep(POLL_S)

    async def until_live(self, version: PolicyVersion) -> dict[str, Any]:
        """The row of the session that brought it."""
        await self.until(lambda: (version, LIVE) in self.registry.records)
        row = self.rows()[-1]
        print(json.dumps(row))
        assert row["equal"] and row["receiver_digests"] == [row["sender_digest"]]
        return row

    async def sync_status(self) -> weight_sync_pb2.GetSyncStatusResponse:
        """What the coordinator says."""
        async with open_channel(self.spec.services.weight_sync.grpc) as channel:
            stub = weight_sync_pb2_grpc.WeightSyncServiceStub(channel)
            request = weight_sync_pb2.GetSyncStatusRequest(run_id=self.spec.run_id)
            return await call(stub.GetSyncStatus, request, timeout_s=END_S)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.spec.run_dir / "weight_sync.jsonl").read_text().splitlines()]

    async def _stand_in(self, role: str, *options: str) -> Process:
        shared = ["--run", str(self.run_file), "--shapes", str(self._shape_file)]
        process = await self._start(role, STAND_IN, role, *shared, *options)
        assert "ready" in await process.hear()
        return process

    async def _start(self, name: str, *arguments: str) -> Process:
        self._processes.append(await start(self._gpus[name], *arguments))
        return self._processes[-1]


def make_spec(folder: Path, ports: list[int], sections: dict[str, Any]) -> RunSpec:
    for name, text in (("config.json", "{}"), ("prompts.jsonl", "")):
        if not (folder / name).exists():
            (folder / name).write_text(text)

    def endpoint(grpc_port: int, http_port: int = 1) -> dict[str, int]:
        return {"grpc_port": grpc_port, "http_port": http_port}

    return RunSpec.model_validate(
        {
            "run_id": "fleet",
            "run_dir": folder / "run",
            "model": {"hf_checkpoint": folder},
            "data": {"prompt_data": folder / "prompts.jsonl"},
            "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2},
            "services": {
                "buffer": endpoint(ports[0]),
                "rollout_gateway": endpoint(ports[1]),
                "weight_agents": [endpoint(ports[2], ports[3])],
                "weight_sync": endpoint(ports[4], ports[5]),
                "engines": [endpoint(ports[6], ports[7])],
            },
            **sections,
        }
    )


async def serve(servicer: object, add: Callable[[Any, grpc.aio.Server], None], port: int) -> grpc.aio.Server:
    server = make_server()
    add(servicer, server)
    bind_server(server, "127.0.0.1", port)
    await server.start()
    return server
