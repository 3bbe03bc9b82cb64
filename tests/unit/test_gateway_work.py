"""Work on leases. The buffer and the engines are scripted gRPC servers (gateway_peers.py); the gateway is real."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from flotilla.buffer.v1 import buffer_pb2
from flotilla.common.v1 import common_pb2
from services.common.errors import Aborted, FailedPrecondition, InvalidArgument
from services.rollout_gateway import work
from services.rollout_gateway.registry import EngineState
from tests.unit.gateway_peers import V2, ScriptedEngine, ended, gateway, make_lease, until


def spans_of(sample: common_pb2.Sample) -> list[tuple[int, int, int]]:
    return [(span.begin, span.end, span.version.step) for span in sample.policy_spans]


async def test_samples_that_finish_together_are_submitted_together():
    async with gateway() as world:
        engine = ScriptedEngine(length=3)
        await world.add_engine(engine)
        world.buffer.add(make_lease(samples=4))
        await until(lambda: len(world.buffer.submitted) == 4)
        assert len(world.buffer.submits) == 1
        sample = world.buffer.submitted[3]
        assert sample.group_id == "g0"
        assert list(sample.prompt_token_ids) == [7, 8, 9]
        assert list(sample.response_token_ids) == [100, 101, 102]
        assert list(sample.rollout_log_probs) == [-1, -2, -3]
        assert list(sample.loss_mask) == [1, 1, 1]
        assert spans_of(sample) == [(0, 3, 0)]
        assert sample.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert [one.seed for one in engine.requests[0].samples] == [1000, 1001, 1002, 1003]
        await until(lambda: world.work.running_groups == 0)
        assert not world.buffer.releases


async def test_a_finished_sample_does_not_wait_for_a_slow_one():
    async with gateway() as world:
        engine = ScriptedEngine(length=4, stops_early={1: 2})
        engine.hold_at = 3
        await world.add_engine(engine)
        world.buffer.add(make_lease(samples=2))
        await until(lambda: 1 in world.buffer.submitted)
        assert world.buffer.submitted[1].finish_reason == common_pb2.FINISH_REASON_STOP
        engine.go.set()
        await until(lambda: 0 in world.buffer.submitted)


async def test_lease_is_renewed_while_there_is_no_engine():
    async with gateway() as world:
        entry = await world.add_engine(ScriptedEngine())
        world.buffer.add(make_lease(required=V2))
        await until(lambda: world.buffer.renewals >= 3)
        assert world.work.running_groups == 1
        world.pool.lose(entry, "test")
        await world.add_engine(ScriptedEngine(version=V2))
        await until(lambda: len(world.buffer.submitted) == 2)
        assert spans_of(world.buffer.submitted[0]) == [(0, 4, 1)]


async def test_lost_lease_drops_everything_and_aborts_at_the_engine():
    async with gateway() as world:
        engine = ScriptedEngine(length=4)
        engine.hold_at = 2
        await world.add_engine(engine)
        world.buffer.add(make_lease())
        await until(lambda: world.generator.generated_tokens == 4)
        world.buffer.lost = True
        await until(lambda: world.work.lost_leases == 1 and engine.dropped == 1)
        assert not world.buffer.submits
        assert not world.buffer.releases
        assert world.work.running_groups == 0


async def test_stop_reason_submits_what_is_finished_and_releases():
    async with gateway() as world:
        engine = ScriptedEngine(length=4, stops_early={1: 2})
        engine.hold_at = 3
        await world.add_engine(engine)
        world.buffer.stop_reason = buffer_pb2.STOP_REASON_RUN_STOPPED
        world.buffer.add(make_lease())
        await until(lambda: len(world.buffer.releases) == 1)
        assert world.buffer.releases[0].error == ""
        assert list(world.buffer.submitted) == [1]
        assert world.buffer.saved() == {0: [100, 101, 102]}


async def test_dead_engine_is_replaced_and_tokens_of_the_same_version_are_continued():
    async with gateway() as world:
        first = ScriptedEngine(length=4)
        first.hold_at = 2
        entry = await world.add_engine(first)
        world.buffer.add(make_lease())
        await until(lambda: world.generator.generated_tokens == 4)
        await world.kill(entry)
        await until(lambda: not world.pool.engines())
        second = ScriptedEngine(length=4)
        await world.add_engine(second)
        await until(lambda: len(world.buffer.submitted) == 2)
        assert [list(one.response_token_ids) for one in second.requests[0].samples] == [[100, 101]] * 2
        assert list(world.buffer.submitted[0].response_token_ids) == [100, 101, 102, 103]
        assert list(world.buffer.submitted[0].rollout_log_probs) == [-1, -2, -3, -4]
        assert spans_of(world.buffer.submitted[0]) == [(0, 4, 0)]
        assert world.generator.generated_tokens == 8


async def test_dead_engine_is_replaced_and_tokens_of_another_version_are_generated_again():
    async with gateway() as world:
        first = ScriptedEngine(length=4, stops_early={1: 1})
        first.hold_at = 2
        entry = await world.add_engine(first)
        world.buffer.add(make_lease())
        await until(lambda: world.generator.generated_tokens == 3)
        await world.kill(entry)
        second = ScriptedEngine(version=V2, length=4)
        await world.add_engine(second)
        await until(lambda: len(world.buffer.submitted) == 2)
        assert [(one.sample_index, one.seed) for one in second.requests[0].samples] == [(0, 1000)]
        assert spans_of(world.buffer.submitted[0]) == [(0, 4, 1)]
        assert spans_of(world.buffer.submitted[1]) == [(0, 1, 0)]


async def test_engine_that_is_not_renewed_loses_its_groups():
    async with gateway() as world:
        first = ScriptedEngine(length=4)
        first.hold_at = 2
        entry = await world.add_engine(first)
        world.buffer.add(make_lease())
        await until(lambda: world.generator.generated_tokens == 4)
        world.pool.lose(entry, "as expiry does")
        await until(lambda: first.dropped == 1)
        await world.add_engine(ScriptedEngine(length=4), "engine-1")
        await until(lambda: len(world.buffer.submitted) == 2)


async def test_error_that_repeats_releases_the_lease_with_it():
    async with gateway() as world:
        engine = ScriptedEngine()
        engine.errors = [InvalidArgument("no such token") for _ in range(3)]
        await world.add_engine(engine)
        world.buffer.add(make_lease())
        await until(lambda: len(world.buffer.releases) == 1)
        assert "no such token" in world.buffer.releases[0].error
        assert len(engine.requests) == 3


async def test_error_that_passes_costs_nothing_but_time():
    async with gateway() as world:
        engine = ScriptedEngine()
        engine.errors = [
            InvalidArgument("odd"),
            InvalidArgument("odd"),
            Aborted("aborted by hand"),
            InvalidArgument("odd"),
        ]
        await world.add_engine(engine)
        world.buffer.add(make_lease())
        await until(lambda: len(world.buffer.submitted) == 2)
        assert not world.buffer.releases


async def test_buffer_away_neither_stops_generation_nor_loses_samples():
    async with gateway() as world:
        engine = ScriptedEngine(length=4)
        engine.hold_at = 2
        await world.add_engine(engine)
        world.buffer.add(make_lease())
        await until(lambda: world.generator.generated_tokens == 4)
        world.buffer.away = True
        engine.go.set()
        await until(lambda: world.generator.finished_samples == 2)
        await asyncio.sleep(0.6)
        assert not world.buffer.submits
        world.buffer.away = False
        await until(lambda: len(world.buffer.submitted) == 2)
        assert engine.dropped == 0


async def test_groups_are_spread_and_leases_follow_the_room():
    async with gateway(concurrency=4) as world:
        engines = [ScriptedEngine(length=4), ScriptedEngine(length=4)]
        for index, engine in enumerate(engines):
            engine.hold_at = 2
            await world.add_engine(engine, f"engine-{index}")
        for index in range(6):
            world.buffer.add(make_lease(f"g{index}"))
        await until(lambda: world.generator.generated_tokens == 4 * 4)
        assert [len(engine.requests) for engine in engines] == [2, 2]
        assert world.work.running_groups == 4
        for engine in engines:
            engine.go.set()
        await until(lambda: len(world.buffer.submits) == 6)


async def test_nothing_is_leased_without_an_engine_that_serves_or_while_paused():
    async with gateway() as world:
        world.buffer.add(make_lease())
        await asyncio.sleep(0.1)
        assert not world.buffer.lease_requests
        world.work.set_paused(True)
        await world.add_engine(ScriptedEngine())
        await asyncio.sleep(0.1)
        assert not world.buffer.lease_requests
        world.work.set_paused(False)
        await until(lambda: len(world.buffer.submitted) == 2)


@pytest.mark.parametrize("how", ["paused", "lost"])
async def test_nothing_is_leased_where_the_room_closes_while_more_is_gathered(monkeypatch, how):
    monkeypatch.setattr(work, "GATHER_S", 0.2)
    async with gateway() as world:
        world.buffer.add(make_lease())
        entry = await world.add_engine(ScriptedEngine())
        await asyncio.sleep(0.05)
        if how == "paused":
            world.work.set_paused(True)
        else:
            world.pool.lose(entry, "test")
        await asyncio.sleep(0.4)
        assert not world.buffer.lease_requests
        world.work.set_paused(False)
        await world.add_engine(ScriptedEngine(), "another")
        await until(lambda: len(world.buffer.submitted) == 2)


async def test_abort_by_hand_releases_with_what_is_finished():
    async with gateway() as world:
        engine = ScriptedEngine(length=4, stops_early={0: 1})
        engine.hold_at = 2
        await world.add_engine(engine)
        world.buffer.add(make_lease("g0"))
        world.buffer.add(make_lease("g1"))
        await until(lambda: world.generator.generated_tokens == 6)
        assert world.work.abort(["g1", "unknown"]) == 1
        await until(lambda: len(world.buffer.releases) == 1)
        assert world.buffer.releases[0].group_id == "g1"
        await until(lambda: world.work.running_groups == 1)


async def test_end_of_the_work_loop_hands_everything_back():
    async with gateway(works=False) as world:
        engine = ScriptedEngine(length=4, stops_early={0: 1})
        engine.hold_at = 2
        await world.add_engine(engine)
        world.buffer.add(make_lease())
        working = asyncio.create_task(world.work.run())
        await until(lambda: world.generator.generated_tokens == 3)
        async with asyncio.timeout(3):
            await ended(working)
        assert list(world.buffer.submitted) == [0]
        assert [release.error for release in world.buffer.releases] == [""]
        assert world.buffer.saved() == {1: [100, 101]}
        assert world.work.running_groups == 0


async def test_end_of_the_work_loop_outlasts_more_cancellations():
    async with gateway(works=False) as world:
        engine = ScriptedEngine(length=4)
        engine.hold_at = 2
        await world.add_engine(engine)
        world.buffer.add(make_lease())
        working = asyncio.create_task(world.work.run())
        await until(lambda: world.generator.generated_tokens == 4)
        world.buffer.away = True
        for _ in range(5):
            working.cancel()
            await asyncio.sleep(0.05)
        world.buffer.away = False
        await asyncio.wait([working], timeout=3)
        assert working.cancelled()
        assert world.buffer.saved() == {0: [100, 101], 1: [100, 101]}
        assert len(world.buffer.releases) == 1


async def test_other_run_spec_ends_the_work_loop():
    async with gateway(works=False) as world:
        world.buffer.refuses_run = True
        with pytest.raises(FailedPrecondition):
            await world.work.run()


async def test_paused_engine_gets_no_new_group():
    async with gateway() as world:
        engine = ScriptedEngine()
        entry = await world.add_engine(engine)
        world.pool.renew(replace(entry, state=EngineState.PAUSED))
        world.buffer.add(make_lease())
        await asyncio.sleep(0.1)
        assert not engine.requests
        world.pool.renew(entry)
        await until(lambda: len(world.buffer.submitted) == 2)
