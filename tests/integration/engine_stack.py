"""A real engine process for tests, and what a test asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2, engine_pb2_grpc
from services.common.rpc import call, from_rpc_error, open_channel
from services.common.spec import RunSpec
from tests.conftest import free_ports

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 150.0
STOP_S = 30.0
RUN_ID = "engine-test"
STOP_TOKEN = 2


def write_spec(folder: Path, checkpoint: Path, **sections: dict[str, Any]) -> RunSpec:
    """A run spec with free ports, also as run.toml in the folder; `sections` add to those that are given here."""
    ports = free_ports(6)
    (folder / "prompts.jsonl").touch()
    endpoints = [{"grpc_port": ports[i], "http_port": ports[i + 1]} for i in (0, 2, 4)]
    spec = RunSpec.model_validate(
        {
            "run_id": RUN_ID,
            "run_dir": str(folder / "run"),
            "model": {"hf_checkpoint": str(checkpoint)},
            "data": {"prompt_data": str(folder / "prompts.jsonl"), "max_prompt_tokens": 64},
            "rollout": {
                "num_rollout": 1,
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 4,
                "max_response_tokens": 400,
            },
            **sections,
            "engine": {"dtype": "float32", "max_model_len": 500, **sections.get("engine", {})},
            "services": {"engines": [endpoints[0]], "rollout_gateway": endpoints[1], "buffer": endpoints[2]},
        }
    )
    (folder / "run.toml").write_text(spec.to_toml())
    return spec


@contextlib.contextmanager
def process(module: str, spec_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A service as a process; its output goes to a log beside the spec. Ended with SIGTERM if it still runs."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (spec_file.parent / f"{module}.log").open("ab") as log:
        command = [sys.executable, "-m", module, "--run", str(spec_file)]
        child = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise


@dataclass
class Response:
    """What came for one sample."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """Begin, end and step, neighbours of one step joined."""
    finish: int = common_pb2.FINISH_REASON_UNSPECIFIED

    def add(self, delta: engine_pb2.SampleDelta) -> None:
        """Append a delta; checks that spans cover it and follow what came before."""
        assert self.finish == common_pb2.FINISH_REASON_UNSPECIFIED
        assert len(delta.log_probs) == len(delta.token_ids)
        for span in delta.policy_spans:
            begin = self.spans[-1][1] if self.spans else 0
            assert span.begin == begin
            if self.spans and self.spans[-1][2] == span.version.step:
                begin = self.spans.pop()[0]
            self.spans.append((begin, span.end, span.version.step))
        self.token_ids += delta.token_ids
        self.log_probs += delta.log_probs
        assert (self.spans[-1][1] if self.spans else 0) == len(self.token_ids)
        self.finish = delta.finish_reason


def sampling(temperature: float = 0.0, max_tokens: int = 32, stop: tuple[int, ...] = ()) -> common_pb2.SamplingParams:
    """Sampling parameters."""
    return common_pb2.SamplingParams(
        temperature=temperature, top_p=1, top_k=-1, max_response_tokens=max_tokens, stop_token_ids=stop
    )


class EngineClient:
    """Calls one engine."""

    def __init__(self, stub: engine_pb2_grpc.EngineServiceAsyncStub) -> None:
        self.stub = stub

    async def generate(
        self,
        prompt: list[int],
        params: common_pb2.SamplingParams,
        *,
        done: tuple[int, ...] = (),
        samples: int = 1,
        seed: int = 0,
        group_id: str = "g",
        required_step: int | None = None,
        progress: list[Response] | None = None,
    ) -> list[Response]:
        """Generate a group to its end; `progress` grows meanwhile."""
        responses = progress if progress is not None else []
        responses += [Response() for _ in range(samples)]
        request = engine_pb2.EngineServiceGenerateRequest(
            run_id=RUN_ID,
            group_id=group_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            samples=[
                engine_pb2.SampleRequest(sample_index=index, response_token_ids=done, seed=seed + index)
                for index in range(samples)
            ],
            required_version=None if required_step is None else version(required_step),
        )
        try:
            async for message in self.stub.Generate(request, timeout=60):
                for delta in message.deltas:
                    responses[delta.sample_index].add(delta)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return responses

    async def start_update(self, session_id: str, step: int, patience_s: float = 0, **session: Any) -> None:
        """First phase; `session` are further fields of the request."""
        request = engine_pb2.StartWeightUpdateRequest(
            run_id=RUN_ID, session_id=session_id, version=version(step), **session
        )
        request.session_timeout.FromSeconds(30)
        await call(self.stub.StartWeightUpdate, request, timeout_s=20, patience_s=patience_s)

    async def receive(self, session_id: str) -> engine_pb2.ReceiveWeightsResponse:
        """Wait for the bytes."""
        request = engine_pb2.ReceiveWeightsRequest(run_id=RUN_ID, session_id=session_id)
        return await call(self.stub.ReceiveWeights, request, timeout_s=20)

    async def finish(self, session_id: str) -> engine_pb2.FinishWeightUpdateResponse:
        """Second phase."""
        request = engine_pb2.FinishWeightUpdateRequest(run_id=RUN_ID, session_id=session_id)
        return await call(self.stub.FinishWeightUpdate, request, timeout_s=20)

    async def update(self, checkpoint: Path, step: int) -> engine_pb2.FinishWeightUpdateResponse:
        """Bring the weights of a checkpoint as version (1, step)."""
        session_id = f"{checkpoint}@{step}"
        await self.start_update(session_id, step)
        await self.receive(session_id)
        return await self.finish(session_id)


def version(step: int) -> common_pb2.PolicyVersion:
    """A version of run epoch 1."""
    return common_pb2.PolicyVersion(run_epoch=1, step=step)


@contextlib.asynccontextmanager
async def client_of(spec: RunSpec, start_s: float = START_S) -> AsyncIterator[EngineClient]:
    """A client once the engine serves, which may take `start_s`."""
    async with open_channel(spec.services.engines[0].grpc) as channel:
        client = EngineClient(engine_pb2_grpc.EngineServiceStub(channel))
        request = engine_pb2.GetWeightVersionRequest(run_id=RUN_ID)
        await call(client.stub.GetWeightVersion, request, timeout_s=5, patience_s=start_s)
        yield client


def descendants(pid: int) -> list[int]:
    """Processes that descend from one, that one left out."""
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def command_of(pid: int) -> str:
    """Command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text()


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if it is gone or a zombie."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state == "Z" else int(parent)


def kill_all(pids: list[int]) -> None:
    """End processes that a failed test would leave behind."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def all_gone(pids: list[int], timeout_s: float) -> None:
    """Wait until none of the processes exists."""
    async with asyncio.timeout(timeout_s):
        while any(parent_of(pid) for pid in pids):  # noqa: ASYNC110  processes of others have no event
            await asyncio.sleep(0.05)
