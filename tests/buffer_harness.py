"""The real buffer in the test's event loop, over a real Redis; only the reward service is scripted."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import buffer_pb2_grpc, registry_pb2_grpc
from flotilla.buffer.v1 import registry_pb2 as registry_pb
from flotilla.common.v1 import common_pb2
from flotilla.reward.v1 import reward_pb2, reward_pb2_grpc
from services.buffer import __main__ as buffer_main
from services.common.board import StatusBoard
from services.common.rpc import bind_server, duration, make_server, open_channel
from services.common.service import ServiceHost
from services.common.spec import RunSpec
from tests.conftest import free_ports
from tests.redis_server import RedisServer
from tests.tiny_models import save_tokenizer

RUN_ID = "test"


def make_spec(directory: Path, redis_port: int, **rollout: Any) -> RunSpec:
    """A run of batches of 2 groups of 2 samples, with an evaluation of 2 prompts every 2 steps."""
    model = directory / "model"
    if not model.exists():
        save_tokenizer(model)
        (model / "config.json").write_text("{}")
        for name, count in (("train", 5), ("eval", 2)):
            rows = [{"prompt": [{"role": "user", "content": f"{name} {i}"}], "label": str(i)} for i in range(count)]
            (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ports = free_ports(4)
    settings = {"num_rollout": 3, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "lease_ttl_s": 30.0} | rollout
    return RunSpec.model_validate(
        {
            "run_id": RUN_ID,
            "run_dir": directory / "run",
            "model": {"hf_checkpoint": model},
            "data": {"prompt_data": directory / "train.jsonl"},
            "rollout": settings,
            "evaluation": {"interval": 2, "sets": {"held-out": {"prompt_data": directory / "eval.jsonl"}}},
            "services": {
                "buffer": {"grpc_port": ports[0], "http_port": ports[1]},
                "reward": {"grpc_port": ports[2], "http_port": ports[3]},
            },
            "redis": {"port": redis_port},
            "engine": {"max_model_len": 1 << 16},
            "trainer": {"save_interval": 2},
        }
    )


class ScriptedReward(reward_pb2_grpc.RewardServiceServicer):
    """Rewards by a function of the response text."""

    def __init__(self, reward: Callable[[str], float]) -> None:
        self.reward = reward
        self.graded = 0
        self.answer = self.honest
        """How Grade is answered."""

    async def Grade(self, request, context):
        return await self.answer(request, context)

    async def honest(self, request, context):
        self.graded += len(request.items)
        return reward_pb2.GradeResponse(
            items=[
                reward_pb2.GradedItem(
                    verdict=reward_pb2.VERDICT_SCORED,
                    value=self.reward(item.response),
                    reason=reward_pb2.VERDICT_REASON_CORRECT,
                )
                for item in request.items
            ]
        )

    async def ListGraders(self, request, context):
        return reward_pb2.ListGradersResponse()


def first_is_right(response: str) -> float:
    """1 for the response of sample 0, 0 for the others."""
    return float(response.startswith("0"))


@dataclass
class Buffer:
    """A running buffer with clients."""

    spec: RunSpec
    reward: ScriptedReward = field(default_factory=lambda: ScriptedReward(first_is_right))

    async def start(self) -> Buffer:
        self.host = ServiceHost(self.spec, self.spec.services.buffer, StatusBoard("buffer"), make_server())
        self.reward_server = make_server()
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self.reward, self.reward_server)
        bind_server(self.reward_server, "127.0.0.1", self.spec.services.reward.grpc_port)
        await self.reward_server.start()
        bind_server(self.host.server, "127.0.0.1", self.spec.services.buffer.grpc_port)
        await buffer_main.setup(self.host)
        await self.host.server.start()
        self.channel = open_channel(self.spec.services.buffer.grpc)
        self.stub = buffer_pb2_grpc.BufferServiceStub(self.channel)
        self.registry = registry_pb2_grpc.RunRegistryServiceStub(self.channel)
        return self

    async def stop(self) -> None:
        await self.host.cancel_tasks()
        await self.channel.close()
        await self.host.server.stop(0)
        await self.reward_server.stop(0)
        for stop in reversed(self.host.on_stop):
            await stop()

    # ------------------------------------------------------------------------------------------------ short forms

    async def begin_epoch(self, step: int = 0, digests: tuple[str, ...] = (), request_id: str | None = None) -> int:
        request = registry_pb.BeginEpochRequest(
            run_id=RUN_ID, request_id=request_id or uuid.uuid4().hex, checkpoint_step=step, batch_digests=digests
        )
        return (await self.registry.BeginEpoch(request, timeout=10)).run_epoch

    async def go_live(self, epoch: int, step: int) -> None:
        version = registry_pb.Version(
            version=common_pb2.PolicyVersion(run_epoch=epoch, step=step), state=registry_pb.VERSION_STATE_LIVE
        )
        await self.registry.RecordVersion(
            registry_pb.RecordVersionRequest(run_id=RUN_ID, request_id=uuid.uuid4().hex, version=version), timeout=10
        )

    async def lease(self, max_groups: int = 64, wait_s: float = 0.0, request_id: str | None = None) -> list[Any]:
        request = pb.LeaseWorkRequest(
            run_id=RUN_ID,
            request_id=request_id or uuid.uuid4().hex,
            worker_id="w",
            max_groups=max_groups,
            wait_timeout=duration(wait_s),
        )
        return list((await self.stub.LeaseWork(request, timeout=wait_s + 10)).leases)

    def fragment(self, index: int, begin: int, text: str, version: tuple[int, int] = (1, 0)) -> Any:
        """Tokens of an unfinished sample, from token `begin` on."""
        tokens = [_TOKENS[character] for character in text]
        return pb.SampleFragment(
            sample_index=index,
            begin=begin,
            response_token_ids=tokens,
            rollout_log_probs=[-1.0] * len(tokens),
            policy_spans=[_span(begin, begin + len(tokens), version)],
        )

    async def renew(self, lease: Any, *progress: Any) -> str:
        """Extend a lease and save tokens; returns why it must stop, or ''."""
        request = pb.RenewLeaseRequest(
            run_id=RUN_ID,
            request_id=uuid.uuid4().hex,
            lease_token=lease.lease_token,
            group_id=lease.group_id,
            progress=progress,
        )
        reason = (await self.stub.RenewLease(request, timeout=10)).stop_reason
        return pb.StopReason.Name(reason).removeprefix("STOP_REASON_") if reason else ""

    async def release(self, lease: Any, *progress: Any, error: str = "") -> None:
        request = pb.ReleaseLeaseRequest(
            run_id=RUN_ID,
            request_id=uuid.uuid4().hex,
            lease_token=lease.lease_token,
            group_id=lease.group_id,
            error=error,
            progress=progress,
        )
        await self.stub.ReleaseLease(request, timeout=10)

    async def group(self, group_id: str) -> Any:
        return (await self.stub.GetGroup(pb.GetGroupRequest(run_id=RUN_ID, group_id=group_id), timeout=10)).summary

    async def audit(self) -> list[str]:
        """What contradicts itself in the ledger."""
        answer = await self.stub.AuditLedger(pb.AuditLedgerRequest(run_id=RUN_ID), timeout=60)
        return [f"{one.subject}: {one.problem}" for one in answer.discrepancies]

    async def submit(self, lease: Any, indices: tuple[int, ...] | None = None, text: str = "", version=(1, 0)) -> Any:
        """Submit samples whose responses are their index and then `text`."""
        samples = [
            make_sample(lease, s.sample_index, text, version)
            for s in lease.pending_samples
            if indices is None or s.sample_index in indices
        ]
        request = pb.SubmitSamplesRequest(
            run_id=RUN_ID,
            request_id=uuid.uuid4().hex,
            lease_token=lease.lease_token,
            group_id=lease.group_id,
            samples=samples,
        )
        return await self.stub.SubmitSamples(request, timeout=10)

    async def lease_batch(self, epoch: int, wait_s: float = 5.0, dp: int = 1, max_tokens: int = 100_000) -> Any:
        request = pb.LeaseBatchRequest(
            run_id=RUN_ID,
            request_id=uuid.uuid4().hex,
            run_epoch=epoch,
            data_parallel_size=dp,
            max_tokens_per_micro_batch=max_tokens,
            wait_timeout=duration(wait_s),
        )
        return await self.stub.LeaseBatch(request, timeout=wait_s + 10)

    async def ack(self, epoch: int, manifest: Any) -> None:
        request = pb.AckBatchRequest(
            run_id=RUN_ID,
            request_id=uuid.uuid4().hex,
            run_epoch=epoch,
            batch=manifest.batch,
            digest=manifest.digest,
        )
        await self.stub.AckBatch(request, timeout=10)

    async def commit(self, epoch: int, step: int) -> None:
        request = pb.CommitRequest(
            run_id=RUN_ID, request_id=uuid.uuid4().hex, run_epoch=epoch, step=step, checkpoint=f"step-{step}"
        )
        await self.stub.Commit(request, timeout=10)

    async def stats(self) -> Any:
        return await self.stub.GetBufferStats(pb.GetBufferStatsRequest(run_id=RUN_ID), timeout=10)

    async def counts(self) -> dict[str, int]:
        """Non-zero training counts by state; asserts the conservation law."""
        stats = await self.stats()
        found = {pb.GroupState.Name(c.state).removeprefix("GROUP_STATE_"): c.count for c in stats.groups if c.count}
        assert stats.conserved and sum(found.values()) == stats.issued, (found, stats.issued)
        assert stats.evaluation_conserved
        return found

    async def until(self, **wanted: int) -> dict[str, int]:
        """Wait until the counts are as wanted."""
        found: dict[str, int] = {}
        for _ in range(200):
            found = await self.counts()
            if all(found.get(state, 0) == count for state, count in wanted.items()):
                return found
            await asyncio.sleep(0.05)
        raise AssertionError(f"wanted {wanted}, still {found}")

    async def fill_batch(self, epoch: int, text: str = "") -> list[Any]:
        """Generate whatever is handed out, by the live weights."""
        done = []
        version = (epoch, (await self.stats()).live_version.step)
        while leases := await self.lease():
            for lease in leases:
                await self.submit(lease, text=text, version=version)
            done += leases
        return done


def make_sample(lease: Any, index: int, text: str, version: tuple[int, int]) -> Any:
    """A finished sample: tokens of its index and a text, one byte or special token each."""
    tokens = [_TOKENS[one] for one in re.findall(r"<\|\w+\|>|.", f"{index}{text}", re.DOTALL)]
    return common_pb2.Sample(
        group_id=lease.group_id,
        sample_index=index,
        prompt_token_ids=lease.prompt_token_ids,
        response_token_ids=tokens,
        rollout_log_probs=[-1.0] * len(tokens),
        loss_mask=[1] * len(tokens),
        policy_spans=[_span(0, len(tokens), version)],
        finish_reason=common_pb2.FINISH_REASON_STOP,
    )


def _span(begin: int, end: int, version: tuple[int, int]) -> Any:
    weights = common_pb2.PolicyVersion(run_epoch=version[0], step=version[1])
    return common_pb2.PolicySpan(begin=begin, end=end, version=weights)


def _byte_tokens() -> dict[str, int]:
    from tokenizers import pre_tokenizers

    from tests.tiny_models import SPECIAL_TOKENS

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}


_TOKENS = _byte_tokens()


async def status_of(call: Any) -> str:
    """Name of the status that a call ends with."""
    try:
        await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def start_redis(directory: Path) -> RedisServer:
    """A Redis with its data in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    return RedisServer(directory)


@asynccontextmanager
async def running(directory: Path, redis: RedisServer | None = None, **rollout: Any) -> AsyncIterator[Buffer]:
    """A buffer without evaluation, ended by an audit that finds nothing."""
    server = redis or start_redis(directory / "redis")
    table = make_spec(directory, server.port, **rollout).model_dump() | {"evaluation": {}}
    buffer = Buffer(RunSpec.model_validate(table))
    try:
        await buffer.start()
        yield buffer
        assert await buffer.audit() == []
        await buffer.counts()
    finally:
        await buffer.stop()
        server.stop()


async def train(buffer: Buffer, epoch: int) -> Any:
    """Lease and acknowledge the next batch."""
    manifest = (await buffer.lease_batch(epoch)).manifest
    await buffer.ack(epoch, manifest)
    return manifest
