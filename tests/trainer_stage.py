"""The trainer's processes between stand-ins for their peers (tests/trainer_peers.py)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from services.common.spec import DeviceEndpoint, Endpoint, RunSpec, ServicesSpec, load_run
from tests.conftest import free_ports
from tests.trainer_cases import make_spec
from tests.trainer_peers import Peers, serve_agent, serve_peers

STEPS = 4
ROOT = Path(__file__).parents[1]
Trainer = asyncio.subprocess.Process


class Stage:
    """A run directory, the stand-ins, and trainers that come and go."""

    def __init__(self, spec_file: Path, spec: RunSpec, peers: Peers, agents: list[Peers]) -> None:
        self.spec_file, self.spec, self.peers, self.agents = spec_file, spec, peers, agents
        self.shared_memory = [Path(f"/dev/shm/flotilla-{spec.run_id}-rank{rank}") for rank in range(len(agents))]

    async def start(self, rank: int = 0, **environment: str) -> Trainer:
        """One rank."""
        command = [sys.executable, "-m", "services.trainer", "--run", str(self.spec_file)]
        at = self.spec.services
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(at.trainer_meeting_port)}
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(len(at.trainers))}
        environment = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", **meeting, **ranks, **environment}
        return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE, env=environment)

    async def start_all(self) -> list[Trainer]:
        """All ranks."""
        return [await self.start(rank) for rank in range(len(self.agents))]

    def rows(self) -> list[dict[str, float]]:
        """Of metrics.jsonl."""
        return [json.loads(line) for line in (self.spec.run_dir / "metrics.jsonl").read_text().splitlines()]

    def exported(self) -> dict[str, torch.Tensor]:
        """The Hugging Face checkpoint at the end."""
        files = (self.spec.run_dir / "hf").glob("*.safetensors")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def content_of(run_dir: Path) -> dict[str, str]:
    """SHA-256 of all weights, moments and random states in the last checkpoint of a run, by file."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    files = json.loads((newest / "state.json").read_text())["files"]
    return {f"{newest.name}/{name}": value for name, value in files.items() if name.endswith(".distcp")}


async def finish(process: Trainer, timeout_s: float = 90.0) -> tuple[int, str]:
    """Exit code and standard error."""
    try:
        async with asyncio.timeout(timeout_s):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        raise
    assert process.returncode is not None
    return process.returncode, errors.decode()


async def finish_all(processes: Sequence[Trainer], timeout_s: float = 120.0) -> list[tuple[int, str]]:
    """Exit codes and standard errors by rank; whoever does not end in time is killed."""
    try:
        return await asyncio.gather(*(finish(one, timeout_s) for one in processes))
    finally:
        for one in processes:
            with suppress(ProcessLookupError):
                os.kill(one.pid, 9)


@asynccontextmanager
async def make_stage(run_id: str, model: Path, tmp_path: Path, ranks: int = 1, **sections: Any) -> AsyncIterator[Stage]:
    """A run of STEPS steps, and what it needs."""
    names = ["buffer", "agent", "weight_sync", "meeting", *(f"{x}{rank}" for rank in range(ranks) for x in "agh")]
    at = dict(zip(names, free_ports(len(names)), strict=True))
    at["a0"] = at["agent"]
    trainers = [DeviceEndpoint(grpc_port=at[f"g{rank}"], http_port=at[f"h{rank}"]) for rank in range(ranks)]
    services = ServicesSpec(
        buffer=Endpoint(grpc_port=at["buffer"], http_port=1),
        weight_sync=Endpoint(grpc_port=at["weight_sync"], http_port=1),
        trainer=trainers[0],
        trainer_ranks=trainers[1:],
        trainer_meeting_port=at["meeting"],
        weight_agents=[DeviceEndpoint(grpc_port=at[f"a{rank}"], http_port=1) for rank in range(ranks)],
    )
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    trainer = {"save_interval": 2, "keep_checkpoints": 1, "num_threads": 1, "balance_data": True}
    spec = make_spec(
        model,
        tmp_path / "run",
        algorithm={"num_steps_per_rollout": 2},
        optimizer={"lr": 3e-3},
        trainer={**trainer, **sections.pop("trainer", {})},
        rollout={"num_rollout": STEPS},
        services=services.model_dump(mode="json"),
        data={"prompt_data": str(tmp_path / "prompts.jsonl")},
        **sections,
    ).model_copy(update={"run_id": run_id})
    spec_file = tmp_path / "run.toml"
    spec_file.write_text(spec.to_toml())
    peers = Peers(num_rollout=STEPS)
    agents = [peers, *(Peers(num_rollout=STEPS) for _ in range(1, ranks))]
    servers = await serve_peers(peers, at)
    servers += [await serve_agent(agents[rank], at[f"a{rank}"]) for rank in range(1, ranks)]
    stage = Stage(spec_file, load_run(spec_file), peers, agents)
    try:
        yield stage
    finally:
        for memory in stage.shared_memory:  # of ranks that were killed
            memory.unlink(missing_ok=True)
        await asyncio.gather(*(server.stop(None) for server in servers))
