"""Slow groups, filters that drop everything, services that answer nonsense: the run goes on and nothing is harmed.

The buffer over a real Redis and real gRPC. The reward service is scripted and the test plays gateway and trainer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import registry_pb2 as registry_pb
from flotilla.reward.v1 import reward_pb2
from tests.buffer_harness import RUN_ID, Buffer, ScriptedReward, make_spec, running, start_redis, status_of, train


@pytest.mark.parametrize(
    "options",
    [
        {"max_staleness": 2},
        {"max_staleness": 3},
        {"max_staleness": 2, "max_sample_age": 4},
        {"max_staleness": 1, "over_sampling_batch_size": 4},
    ],
    ids=str,
)
async def test_groups_that_take_long_are_not_too_old_when_they_come(tmp_path, options):
    async with running(tmp_path, num_rollout=12, **options) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        first, second, *slow = await buffer.lease()
        for lease in (first, second):
            await buffer.submit(lease)
        step = 0
        while (answer := await buffer.lease_batch(epoch, wait_s=1.5)).HasField("manifest"):
            await buffer.ack(epoch, answer.manifest)
            step += 1
            await buffer.go_live(epoch, step)
            for lease in await buffer.lease():
                await buffer.submit(lease, version=(1, step))
        for lease in slow:
            await buffer.submit(lease)
        for _ in range(2):
            step += 1
            assert (await train(buffer, epoch)).stats.max_age <= buffer.spec.rollout.sample_age
            await buffer.go_live(epoch, step)
        assert not (await buffer.stats()).stale


async def test_a_filter_with_fallback_ends_its_step_when_all_rewards_are_equal(tmp_path):
    options = {"dynamic_sampling_filter": "nonzero_std_with_fallback", "over_sampling_batch_size": 4}
    async with running(tmp_path, **options) as buffer:
        buffer.reward.reward = lambda text: 1.0
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        for _ in range(4):
            await buffer.fill_batch(epoch)
            await asyncio.sleep(0.3)
        await train(buffer, epoch)
        assert (await buffer.stats()).issued <= 6


async def test_a_version_beyond_all_numbers_is_refused(tmp_path):
    async with running(tmp_path) as buffer:
        await buffer.go_live(await buffer.begin_epoch(), 0)
        lease, _ = await buffer.lease()
        for version in ((1, 1 << 62), (1 << 40, 0), (0, 0), (1, -1)):
            assert await status_of(buffer.submit(lease, version=version)) == "INVALID_ARGUMENT"
            assert await status_of(buffer.renew(lease, buffer.fragment(0, 0, "a", version))) == "INVALID_ARGUMENT"


async def test_verdicts_that_are_missing_are_asked_for_again(tmp_path):
    async with running(tmp_path) as buffer:
        honest, calls = buffer.reward.honest, 0

        async def too_few(request: Any, context: Any) -> reward_pb2.GradeResponse:
            nonlocal calls
            calls += 1
            answer = await honest(request, context)
            return reward_pb2.GradeResponse(items=answer.items[:1]) if calls == 1 else answer

        buffer.reward.answer = too_few
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await buffer.fill_batch(epoch)
        await train(buffer, epoch)
        assert calls >= 2


async def test_a_pause_costs_no_evaluation(tmp_path):
    server = start_redis(tmp_path / "redis")
    spec = make_spec(tmp_path, server.port)
    table = spec.model_dump()
    table["evaluation"]["deadline_s"] = 1.5
    buffer = await Buffer(type(spec).model_validate(table), ScriptedReward(lambda text: 1.0)).start()
    try:
        epoch = await buffer.begin_epoch()
        unknown = await buffer.stub.GetEvaluation(pb.GetEvaluationRequest(run_id=RUN_ID, step=0), timeout=10)
        assert not unknown.complete, "nothing was evaluated"
        await set_state(buffer, registry_pb.DESIRED_STATE_PAUSED)
        await buffer.go_live(epoch, 0)
        await asyncio.sleep(2.5)
        await set_state(buffer, registry_pb.DESIRED_STATE_RUNNING)
        for lease in await buffer.lease():
            await buffer.submit(lease)
        request = pb.GetEvaluationRequest(run_id=RUN_ID, step=0)
        request.wait_timeout.FromSeconds(5)
        (result,) = (await buffer.stub.GetEvaluation(request, timeout=10)).results
        assert (result.scored, result.failed) == (2, 0)
    finally:
        await buffer.stop()
        server.stop()


async def set_state(buffer: Buffer, state: Any) -> None:
    request = registry_pb.SetDesiredStateRequest(run_id=RUN_ID, request_id=f"s{state}", desired_state=state)
    await buffer.registry.SetDesiredState(request, timeout=10)
