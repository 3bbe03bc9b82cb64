"""Tokens that are saved as they come. Buffer and engines are scripted gRPC servers (gateway_peers.py), and the buffer
refuses fragments that do not follow from what it has; the gateway is real.
"""

from __future__ import annotations

from flotilla.common.v1 import common_pb2
from services.common.errors import InvalidArgument
from services.rollout_gateway import buffer_client
from services.rollout_gateway.spans import Version
from tests.unit.gateway_peers import V1, V2, ScriptedEngine, World, gateway, make_lease, until


async def held_at_two(world: World, version: Version = V1, length: int = 4) -> ScriptedEngine:
    """An engine that holds samples after their second token."""
    engine = ScriptedEngine(version=version, length=length)
    engine.hold_at = 2
    await world.add_engine(engine)
    return engine


def partial(index: int = 1) -> common_pb2.Sample:
    """One token of version V1."""
    version = common_pb2.PolicyVersion(run_epoch=V1.run_epoch, step=V1.step)
    return common_pb2.Sample(
        sample_index=index,
        response_token_ids=[50],
        rollout_log_probs=[-9],
        policy_spans=[common_pb2.PolicySpan(begin=0, end=1, version=version)],
    )


def spans_of(message) -> list[tuple[int, int, int]]:
    return [(span.begin, span.end, span.version.step) for span in message.policy_spans]


async def test_renewals_save_what_is_new_once():
    async with gateway() as world:
        engine = await held_at_two(world)
        world.buffer.add(make_lease())
        await until(lambda: world.buffer.renewals >= 3)
        assert world.buffer.saved() == {0: [100, 101], 1: [100, 101]}
        assert sum(bool(request.progress) for request in world.buffer.renew_requests) == 1
        engine.go.set()
        await until(lambda: len(world.buffer.submitted) == 2)
        assert list(world.buffer.submitted[0].response_token_ids) == [100, 101, 102, 103]


async def test_renewal_whose_answer_is_lost_is_repeated_unchanged():
    async with gateway() as world:
        await held_at_two(world)
        world.buffer.add(make_lease())
        await until(lambda: world.generator.generated_tokens == 4)
        world.buffer.lost_answers = 2
        await until(lambda: world.buffer.renewals >= 2)
        first = world.buffer.renew_requests[0]
        assert world.buffer.renew_requests[1:3] == [first, first]
        assert world.buffer.renew_requests[3].request_id != first.request_id
        assert world.buffer.saved() == {0: [100, 101], 1: [100, 101]}


async def test_saved_tokens_are_continued_and_only_the_rest_is_saved():
    async with gateway() as world:
        engine = await held_at_two(world, V2)
        world.buffer.add(make_lease(partial=partial(), continues=True))
        await until(lambda: world.buffer.saved() == {1: [50, 101]})
        assert list(engine.requests[0].samples[0].response_token_ids) == [50]
        fragment = world.buffer.partial["g0", 1][1]
        assert (fragment.begin, list(fragment.rollout_log_probs)) == (1, [-2])
        assert spans_of(fragment) == [(1, 2, 1)]
        engine.go.set()
        await until(lambda: 1 in world.buffer.submitted)
        sample = world.buffer.submitted[1]
        assert list(sample.response_token_ids) == [50, 101, 102, 103]
        assert list(sample.rollout_log_probs) == [-9, -2, -3, -4]
        assert list(sample.loss_mask) == [1, 1, 1, 1]
        assert spans_of(sample) == [(0, 1, 0), (1, 4, 1)]


async def test_group_that_was_stopped_goes_on_where_it_ended():
    async with gateway() as world:
        engine = await held_at_two(world)
        engine.unflushed = 1
        lease = make_lease(ttl_s=60, continues=True)
        world.buffer.add(lease)
        await until(lambda: world.generator.generated_tokens == 4)
        world.buffer.stop("g0")
        await until(lambda: world.work.running_groups == 0 and len(world.buffer.releases) == 1)
        world.buffer.stops.clear()
        world.buffer.add_again(lease)
        await until(lambda: len(world.buffer.submitted) == 2)
        assert [list(one.response_token_ids) for one in engine.requests[1].samples] == [[100, 101, 102]] * 2
        assert list(world.buffer.submitted[0].response_token_ids) == [100, 101, 102, 103]
        assert list(world.buffer.submitted[0].rollout_log_probs) == [-1, -2, -3, -4]
        assert world.generator.generated_tokens == 8


async def test_tokens_of_older_weights_are_masked_where_the_lease_says_so():
    async with gateway() as world:
        await world.add_engine(ScriptedEngine(version=V2, length=3))
        world.buffer.add(make_lease(partial=partial(), continues=True, masks=True))
        await until(lambda: 1 in world.buffer.submitted)
        assert list(world.buffer.submitted[1].loss_mask) == [0, 1, 1]


async def test_saved_tokens_that_other_weights_drop_are_replaced():
    async with gateway() as world:
        first = await held_at_two(world)
        world.buffer.add(make_lease(partial=partial()))
        await until(lambda: world.buffer.saved() == {1: [50, 101]})
        world.pool.lose(world.pool.engines()[0], "test")
        await until(lambda: first.dropped == 1)
        second = await held_at_two(world, V2, length=5)
        second.hold_at = 4
        await until(lambda: world.buffer.saved() == {1: [50, 101, 102, 103]})
        assert [fragment.begin for fragment in world.buffer.partial["g0", 1]] == [0, 1]
        assert spans_of(world.buffer.partial["g0", 1][1]) == [(1, 4, 1)]


async def test_tokens_are_continued_by_other_weights_where_the_lease_allows_it():
    async with gateway() as world:
        first = await held_at_two(world)
        world.buffer.add(make_lease(continues=True))
        await until(lambda: world.generator.generated_tokens == 4)
        world.pool.lose(world.pool.engines()[0], "test")
        await until(lambda: first.dropped == 1)
        await world.add_engine(ScriptedEngine(version=V2))
        await until(lambda: len(world.buffer.submitted) == 2)
        assert spans_of(world.buffer.submitted[0]) == [(0, 2, 0), (2, 4, 1)]
        assert world.generator.generated_tokens == 8


async def test_evaluation_goes_on_when_its_step_comes_again_in_another_epoch():
    again = Version(V2.run_epoch + 1, V2.step)
    async with gateway() as world:
        engine = ScriptedEngine(version=again)
        await world.add_engine(engine)
        world.buffer.add(make_lease(required=V2))
        await until(lambda: len(world.buffer.submitted) == 2)
        assert engine.requests[0].required_version.run_epoch == again.run_epoch


async def test_failed_lease_is_released_with_its_error_and_its_tokens():
    async with gateway() as world:
        first = await held_at_two(world)
        world.buffer.add(make_lease(ttl_s=60))
        await until(lambda: world.generator.generated_tokens == 4)
        second = ScriptedEngine()
        second.errors = [InvalidArgument("no such token") for _ in range(3)]
        world.pool.lose(world.pool.engines()[0], "test")
        await until(lambda: first.dropped == 1)
        await world.add_engine(second)
        await until(lambda: len(world.buffer.releases) == 1)
        assert "no such token" in world.buffer.releases[0].error
        assert world.buffer.saved() == {0: [100, 101], 1: [100, 101]}


async def test_big_groups_are_saved_released_and_submitted_in_portions(monkeypatch):
    monkeypatch.setattr(buffer_client, "PORTION_TOKENS", 8)
    async with gateway() as world:
        engine = ScriptedEngine(length=12)
        engine.stops_early = {0: 3, 1: 3, 2: 3}
        engine.hold_at = 6
        await world.add_engine(engine)
        world.buffer.add(make_lease(samples=5, ttl_s=60))
        await until(lambda: world.generator.generated_tokens == 3 * 3 + 2 * 6)
        world.buffer.stop("g0")
        await until(lambda: len(world.buffer.releases) == 1)
        assert [len(submit.samples) for submit in world.buffer.submits] == [1, 1, 1]
        assert [len(request.progress) for request in world.buffer.renew_requests] == [1]
        assert [one.sample_index for one in world.buffer.releases[0].progress] == [4]
        assert world.buffer.saved() == {3: [100, 101, 102, 103, 104, 105], 4: [100, 101, 102, 103, 104, 105]}
