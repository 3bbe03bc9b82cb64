"""What the buffer's benchmark runs: a real Redis, a real buffer process, a stand-in for grading, and a trainer's calls.

The reward service answers every item at once with 1 or 0 by turns; nothing is graded and nothing is trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import buffer_pb2_grpc, registry_pb2_grpc
from flotilla.buffer.v1 import registry_pb2 as registry_pb
from flotilla.common.v1 import common_pb2
from flotilla.reward.v1 import reward_pb2, reward_pb2_grpc
from services.common.rpc import bind_server, call, duration, make_server, new_request_id, open_channel
from services.common.spec import RunSpec
from tests.conftest import free_ports
from tests.integration.engine_stack import process
from tests.redis_server import RedisServer
from tests.tiny_models import save_tokenizer

BUFFER, UNGRADED = "services.buffer", "benchmarks.buffer_ungraded"
RUN_ID = "benchmark"
BATCH = 32
"""Groups in a batch."""
GROUP = 8
"""Samples in a group."""
STALENESS = 8
"""Batches that may be under way, so that work is always available."""
PROMPTS, PROMPT_TOKENS = 500, 64
NO_END = 1_000_000
"""Batches of the run, and their age limit: more than any measurement makes."""
REDIS_MB = 8192
START_S = 60.0
CALL_S = 30.0
POLL_S = 2.0
SEALED_S = 120.0
LOG_CHARS = 4000
STATS = pb.GetBufferStatsRequest(run_id=RUN_ID)


class InstantReward(reward_pb2_grpc.RewardServiceServicer):
    """Scores at once: 1, 0, 1, 0, ..."""

    async def Grade(self, request: Any, context: Any) -> Any:
        """A verdict for each item, without looking at it."""
        scored, correct = reward_pb2.VERDICT_SCORED, reward_pb2.VERDICT_REASON_CORRECT
        values = itertools.cycle((1.0, 0.0))
        items = [reward_pb2.GradedItem(verdict=scored, reason=correct, value=next(values)) for _ in request.items]
        return reward_pb2.GradeResponse(items=items)

    async def ListGraders(self, request: Any, context: Any) -> Any:
        """None: nobody asks."""
        return reward_pb2.ListGradersResponse()


def make_spec(folder: Path, redis_port: int, response_tokens: int) -> RunSpec:
    """The run, also as run.toml in the folder, with its tokenizer and prompts."""
    save_tokenizer(folder / "model")
    (folder / "model" / "config.json").write_text("{}")
    rows = (json.dumps({"prompt": f"{index:0{PROMPT_TOKENS}d}", "label": "1"}) for index in range(PROMPTS))
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    ports = free_ports(4)
    spec = RunSpec.model_validate(
        {
            "run_id": RUN_ID,
            "run_dir": str(folder / "run"),
            "model": {"hf_checkpoint": str(folder / "model")},
            "data": {"prompt_data": str(folder / "prompts.jsonl"), "apply_chat_template": False},
            "rollout": {
                "num_rollout": NO_END,
                "rollout_batch_size": BATCH,
                "n_samples_per_prompt": GROUP,
                "max_response_tokens": response_tokens,
                "max_staleness": STALENESS,
                "max_sample_age": NO_END,
                "lease_ttl_s": 60,
            },
            "trainer": {"save_interval": 1},
            "engine": {"max_model_len": 2048 + response_tokens},
            "services": {
                "buffer": {"grpc_port": ports[0], "http_port": ports[1]},
                "reward": {"grpc_port": ports[2], "http_port": ports[3]},
            },
            "redis": {"port": redis_port, "maxmemory_mb": REDIS_MB},
        }
    )
    (folder / "run.toml").write_text(spec.to_toml())
    return spec


@dataclass(slots=True)
class Stack:
    """A running buffer; `trainer` trains what it seals."""

    spec: RunSpec
    redis: RedisServer
    buffer: subprocess.Popen[bytes]
    channel: grpc.aio.Channel
    epoch: int = 1
    trained: list[tuple[float, int]] = field(default_factory=list)
    """Time and samples of every batch that was acknowledged."""

    @property
    def target(self) -> str:
        """Where the buffer listens."""
        return self.spec.services.buffer.grpc

    @property
    def stub(self) -> Any:
        """Of the buffer."""
        return buffer_pb2_grpc.BufferServiceStub(self.channel)

    @property
    def pids(self) -> dict[str, int]:
        """The processes of this side; `rest` is this one, with trainer and reward service."""
        return {"buffer": self.buffer.pid, "redis": self.redis.process.pid, "rest": os.getpid()}

    async def begin(self) -> None:
        """Open an epoch, and let the first weights live."""
        registry = registry_pb2_grpc.RunRegistryServiceStub(self.channel)
        request = registry_pb.BeginEpochRequest(run_id=RUN_ID, request_id=new_request_id())
        self.epoch = (await call(registry.BeginEpoch, request, timeout_s=CALL_S)).run_epoch
        await self.publish(0)

    async def publish(self, step: int) -> None:
        """Let a version live."""
        registry = registry_pb2_grpc.RunRegistryServiceStub(self.channel)
        version = common_pb2.PolicyVersion(run_epoch=self.epoch, step=step)
        live = registry_pb.Version(version=version, state=registry_pb.VERSION_STATE_LIVE)
        request = registry_pb.RecordVersionRequest(run_id=RUN_ID, request_id=new_request_id(), version=live)
        await call(registry.RecordVersion, request, timeout_s=CALL_S)

    async def sealed(self, batches: int) -> None:
        """Wait until so many batches are sealed."""
        async with asyncio.timeout(SEALED_S):
            while (await call(self.stub.GetBufferStats, STATS, timeout_s=CALL_S)).sealed_batches < batches:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    def samples_per_s(self, warm_s: float) -> float:
        """Samples that were acknowledged, from a while after the first ones on."""
        begin = self.trained[0][0] + warm_s
        first = next(at for at, (when, _) in enumerate(self.trained) if when >= begin)
        seconds = self.trained[-1][0] - self.trained[first][0]
        return sum(count for _, count in self.trained[first + 1 :]) / seconds

    async def train(self) -> None:
        """Lease, acknowledge, publish and commit batches, without an end."""
        while True:
            manifest = await self.lease_batch()
            if manifest is not None:
                await self.finish_batch(manifest)

    async def lease_batch(self) -> pb.BatchManifest | None:
        """The next batch; None if none is sealed in time."""
        request = pb.LeaseBatchRequest(
            run_id=RUN_ID,
            request_id=new_request_id(),
            run_epoch=self.epoch,
            data_parallel_size=1,
            max_tokens_per_micro_batch=1 << 16,
            wait_timeout=duration(POLL_S),
        )
        answer = await call(self.stub.LeaseBatch, request, timeout_s=CALL_S)
        return answer.manifest if answer.HasField("manifest") else None

    async def finish_batch(self, manifest: pb.BatchManifest) -> None:
        """Acknowledge, publish, commit."""
        ids = {"run_id": RUN_ID, "request_id": new_request_id(), "run_epoch": self.epoch}
        ack = pb.AckBatchRequest(**ids, batch=manifest.batch, digest=manifest.digest)
        await call(self.stub.AckBatch, ack, timeout_s=CALL_S)
        self.trained.append((time.monotonic(), len(manifest.rows)))
        await self.publish(manifest.batch + 1)
        commit = pb.CommitRequest(**ids, step=manifest.batch + 1, checkpoint="none")
        await call(self.stub.Commit, commit, timeout_s=CALL_S)


def start_redis(folder: Path) -> RedisServer:
    """A Redis that keeps its data in the folder, which is made if it is not there."""
    folder.mkdir(exist_ok=True)
    return RedisServer(folder, maxmemory=f"{REDIS_MB}mb")


@contextlib.asynccontextmanager
async def running(folder: Path, response_tokens: int, module: str = BUFFER) -> AsyncIterator[Stack]:
    """A new run with an epoch open and weights live; in a folder that is made if it is not there."""
    redis = start_redis(folder)
    try:
        async with serving(folder, make_spec(folder, redis.port, response_tokens), redis, module) as stack:
            await stack.begin()
            yield stack
    finally:
        redis.stop()


@contextlib.asynccontextmanager
async def serving(folder: Path, spec: RunSpec, redis: RedisServer, module: str = BUFFER) -> AsyncIterator[Stack]:
    """A buffer for the run in a Redis, ready; with the output of the buffer if something fails."""
    reward = make_server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(InstantReward(), reward)
    bind_server(reward, "127.0.0.1", spec.services.reward.grpc_port)
    await reward.start()
    try:
        with process(module, folder / "run.toml") as buffer:
            async with open_channel(spec.services.buffer.grpc) as channel:
                stack = Stack(spec, redis, buffer, channel)
                await call(stack.stub.GetBufferStats, STATS, timeout_s=CALL_S, patience_s=START_S)
                yield stack
    except BaseException:
        sys.stderr.write((folder / f"{module}.log").read_text()[-LOG_CHARS:])
        raise
    finally:
        await reward.stop(None)
