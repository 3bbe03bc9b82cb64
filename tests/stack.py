"""Whole runs for tests: `flotilla up` with every real process, watched from outside while it is up and after."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from flotilla.common.v1 import common_pb2
from services.cli.processes import process_table
from services.common.errors import DeadlineExceeded, Unavailable
from services.common.rpc import call, open_channel
from services.common.spec import RunSpec
from tests.conftest import free_ports

Row = dict[str, Any]
SERVICES = ("buffer", "reward", "rollout_gateway", "trainer", "weight_sync")
FP32_GAP_NATS = 1e-4
"""Largest difference of two float32 implementations of one model; a skipped update shows as far more."""
UP_S = 240.0
"""For a run of a few steps; a quiet machine needs a quarter of it."""
START_S = 60.0
STOP_S = 30.0
LOOK_EVERY_S = 0.25
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
"""Tiny matrices gain nothing from threads, and the processes of a run share few cores."""


def write_run(
    folder: Path, checkpoint: Path, prompts: list[Row], run_id: str = "", ranks: int = 1, **sections: Row
) -> RunSpec:
    """A run on ports of its own, also as run.toml in the folder; `held_out` is the first six prompts.

    The trainer has so many ranks.
    """
    folder.mkdir()
    for name, rows in (("prompts", prompts), ("held_out", prompts[:6])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ports = iter(free_ports(2 * (len(SERVICES) + 2 * ranks) + 2))

    def endpoint() -> Row:
        return {"grpc_port": next(ports), "http_port": next(ports)}

    table: dict[str, Any] = {
        "run_id": run_id or f"{folder.name}-{os.getpid()}",
        "run_dir": str(folder / "run"),
        "model": {"hf_checkpoint": str(checkpoint)},
        "data": {"prompt_data": str(folder / "prompts.jsonl"), "max_prompt_tokens": 64},
        "rollout": {
            "num_rollout": 2,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "max_response_tokens": 32,
            "temperature": 0.8,
        },
        "evaluation": {
            "sets": {"held_out": {"prompt_data": str(folder / "held_out.jsonl")}},
            "max_response_tokens": 32,
        },
        "trainer": {"dtype": "float32"},
        "engine": {"dtype": "float32", "max_model_len": 128, "kv_cache_gib": 0.125},
        "weight_sync": {"quantization": "none"},
        "services": {
            **{name: endpoint() for name in SERVICES},
            "trainer_ranks": [endpoint() for _ in range(1, ranks)],
            "trainer_meeting_port": next(ports),
            "weight_agents": [endpoint() for _ in range(ranks)],
            "engines": [endpoint()],
        },
        "redis": {"port": next(ports), "maxmemory_mb": 128},
    }
    for name, section in sections.items():
        table[name] = table.get(name, {}) | section
    spec = RunSpec.model_validate(table)
    (folder / "run.toml").write_text(spec.to_toml())
    return spec


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def processes_in(folder: Path) -> list[str]:
    """Command lines of the processes whose working directory is in a folder, whatever they call themselves."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink().is_relative_to(folder):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


def shared_memory_of(run_id: str) -> list[Path]:
    """What a run has in shared memory under its name."""
    return list(Path("/dev/shm").glob(f"flotilla-{run_id}*"))


@dataclass(slots=True)
class Ended:
    """A run that has ended."""

    spec: RunSpec
    exit_code: int
    output: str
    """What `flotilla up` printed."""
    stats: list[buffer_pb2.GetBufferStatsResponse]
    """The ledger's counts while the run was up, oldest first."""
    left_running: list[str]
    left_in_shared_memory: list[Path]
    metrics: list[Row] = field(init=False)
    weight_sync: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        assert self.exit_code == 0, self.output
        self.metrics = read_rows(self.spec.run_dir / "metrics.jsonl")
        self.weight_sync = read_rows(self.spec.run_dir / "weight_sync.jsonl")


async def run_to_the_end(spec: RunSpec) -> Ended:
    """`flotilla up` until the run is complete."""
    folder = spec.run_dir.parent
    argv = (sys.executable, "-m", "services.cli.main", "up", str(folder / "run.toml"), "--plain")
    with tempfile.TemporaryFile() as out:
        process = await asyncio.create_subprocess_exec(*argv, cwd=folder, env=ENVIRONMENT, stdout=out, stderr=out)
        stats: list[buffer_pb2.GetBufferStatsResponse] = []
        watching = asyncio.create_task(watch_ledger(spec, stats))
        try:
            async with asyncio.timeout(UP_S):
                exit_code = await process.wait()
        finally:
            watching.cancel()
            await end(process)
        out.seek(0)
        output = out.read().decode()
    return Ended(spec, exit_code, output, stats, processes_in(folder), shared_memory_of(spec.run_id))


async def watch_ledger(spec: RunSpec, stats: list[buffer_pb2.GetBufferStatsResponse]) -> None:
    """Collect the ledger's counts for as long as the buffer answers."""
    async with open_channel(spec.services.buffer.grpc) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        while True:
            with suppress(Unavailable, DeadlineExceeded):
                request = buffer_pb2.GetBufferStatsRequest(run_id=spec.run_id)
                stats.append(await call(stub.GetBufferStats, request, timeout_s=5))
            await asyncio.sleep(LOOK_EVERY_S)


@asynccontextmanager
async def ledger_of(spec: RunSpec) -> AsyncIterator[buffer_pb2_grpc.BufferServiceAsyncStub]:
    """The ledger of a run that has ended: its Redis and its buffer alone, started again."""
    table = {one.name: one for one in process_table(spec, spec.run_dir / "run.toml")}
    folder, quiet = spec.run_dir.parent, asyncio.subprocess.DEVNULL
    started = []
    try:
        for name in ("redis", "buffer"):
            argv = table[name].argv
            started.append(
                await asyncio.create_subprocess_exec(*argv, cwd=folder, env=ENVIRONMENT, stdout=quiet, stderr=quiet)
            )
        async with open_channel(spec.services.buffer.grpc) as channel:
            stub = buffer_pb2_grpc.BufferServiceStub(channel)
            request = buffer_pb2.GetBufferStatsRequest(run_id=spec.run_id)
            await call(stub.GetBufferStats, request, timeout_s=5, patience_s=START_S)
            yield stub
    finally:
        for process in reversed(started):
            await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to one that still runs, and in the end SIGKILL."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


async def evaluation_samples(
    spec: RunSpec, stub: buffer_pb2_grpc.BufferServiceAsyncStub
) -> dict[int, list[common_pb2.Sample]]:
    """Samples of the evaluations by step of the version that generated them, in order of the data file."""
    listing = buffer_pb2.ListGroupsRequest(run_id=spec.run_id, kind=buffer_pb2.WORK_KIND_EVALUATION, page_size=1000)
    groups: list[buffer_pb2.GroupSummary] = []
    while not groups or listing.page_token:
        page = await call(stub.ListGroups, listing, timeout_s=5)
        groups += page.groups
        listing.page_token = page.next_page_token
    found: dict[int, list[common_pb2.Sample]] = {}
    for group in sorted(groups, key=lambda one: one.prompt_index):
        request = buffer_pb2.GetGroupRequest(run_id=spec.run_id, group_id=group.group_id)
        (sample,) = (await call(stub.GetGroup, request, timeout_s=5)).samples
        (step,) = {span.version.step for span in sample.policy_spans}
        found.setdefault(step, []).append(sample)
    return found
