"""The gateway's pure parts: spans, the engine table, routing, the growth of a sample. Nothing is faked."""

from __future__ import annotations

import pytest

from services.common.errors import NotFound
from services.rollout_gateway.engine.generation import GroupSpec, SampleSpec, segment_sampling
from services.rollout_gateway.engine.vllm_engine import Sampling
from services.rollout_gateway.group import Finish, SampleProgress
from services.rollout_gateway.registry import Engine, EngineState, EngineTable
from services.rollout_gateway.router import Router
from services.rollout_gateway.spans import Span, Version, joined, spans_between

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(2, 2)


def engine(name: str, *, incarnation: str = "", state=EngineState.SERVING, version: Version | None = V1) -> Engine:
    return Engine(name, incarnation or name, "127.0.0.1:1", state, version, 1)


def test_version_survives_its_label():
    assert Version.parse(str(Version(12, 345))) == Version(12, 345)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 3, [Span(0, 3, V1)]),
        (3, 12, [Span(3, 5, V1), Span(5, 9, V2), Span(9, 12, V3)]),
        (5, 9, [Span(5, 9, V2)]),
        (9, 9, []),
    ],
)
def test_spans_between_clips_a_history(begin, end, expected):
    assert spans_between([(V1, 0), (V2, 5), (V3, 9)], begin, end) == expected


def test_joined_merges_neighbours_of_one_version_only():
    spans = [Span(0, 2, V1), Span(2, 4, V1), Span(4, 5, V2), Span(5, 6, V1)]
    assert joined(spans) == [Span(0, 4, V1), Span(4, 5, V2), Span(5, 6, V1)]


def test_joined_refuses_a_gap():
    with pytest.raises(AssertionError, match="gap"):
        joined([Span(0, 2, V1), Span(3, 4, V1)])


def test_table_expires_what_is_not_renewed():
    table = EngineTable(ttl_s=5, first_revision=100)
    table.register(engine("a"), now_s=0)
    table.register(engine("b"), now_s=3)
    table.renew(engine("a"), now_s=4)
    assert table.next_expiry_s() == 8
    assert [one.engine_id for one in table.expire(now_s=8)] == ["b"]
    assert [one.engine_id for one in table.list()] == ["a"]
    assert table.expire(now_s=8.9) == []


def test_table_revision_grows_with_every_visible_change_only():
    table = EngineTable(ttl_s=5, first_revision=100)
    revisions = [table.revision]
    table.register(engine("a", version=None, state=EngineState.STALE), now_s=0)
    revisions.append(table.revision)
    table.renew(engine("a", version=V1), now_s=1)
    revisions.append(table.revision)
    table.register(engine("a", version=V1), now_s=2)
    table.renew(engine("a", version=V1), now_s=3)
    revisions.append(table.revision)
    table.expire(now_s=9)
    revisions.append(table.revision)
    assert revisions == [100, 101, 102, 102, 103]


def test_another_incarnation_replaces_the_old_one():
    table = EngineTable(ttl_s=5, first_revision=1)
    old, new = engine("a", incarnation="1"), engine("a", incarnation="2")
    table.register(old, now_s=0)
    table.register(new, now_s=1)
    assert table.list() == [new]
    with pytest.raises(NotFound):
        table.renew(old, now_s=2)
    assert not table.remove(old)
    assert table.list() == [new]


def test_router_takes_the_least_loaded_engine_that_serves():
    engines = [engine("a"), engine("b"), engine("c", state=EngineState.PAUSED), engine("d", version=V2)]
    router = Router(limit=16)
    router.take(engines[0], 8)
    assert router.pick(engines, None) is engines[1]
    router.take(engines[1], 12)
    router.take(engines[3], 12)
    assert router.pick(engines, None) is engines[0]
    assert router.pick(engines, V2) is engines[3]
    assert router.pick(engines, V3) is None
    assert router.capacity(engines) == 3 * 16


def test_router_sends_nothing_to_a_full_engine_until_places_are_free():
    router, one = Router(limit=10), engine("a")
    router.take(one, 8)
    assert router.pick([one], None) is one
    router.take(one, 8)
    assert router.pick([one], None) is None
    router.give_back(one, 7)
    assert router.pick([one], None) is one


def test_progress_is_continued_on_the_same_version():
    sample = SampleProgress(0, seed=5)
    sample.begin_segment(V1)
    sample.extend([1, 2], [-0.1, -0.2], [Span(0, 2, V1)], None)
    sample.begin_segment(V1)
    sample.extend([3], [-0.3], [Span(0, 1, V1)], Finish.STOP)
    assert sample.token_ids == [1, 2, 3]
    assert sample.log_probs == [-0.1, -0.2, -0.3]
    assert sample.spans == [Span(0, 3, V1)]


def test_progress_of_another_version_is_dropped_but_not_what_the_lease_brought():
    sample = SampleProgress(0, 5, [1, 2], [-0.1, -0.2], [1, 1], [Span(0, 2, V1)], kept=2)
    sample.begin_segment(V2)
    sample.extend([3, 4], [-0.3, -0.4], [Span(0, 1, V2), Span(1, 2, V3)], None)
    sample.begin_segment(V2)
    assert (sample.token_ids, sample.log_probs, sample.loss_mask) == ([1, 2], [-0.1, -0.2], [1, 1])
    assert sample.spans == [Span(0, 2, V1)]
    sample.extend([9], [-0.9], [Span(0, 1, V2)], Finish.LENGTH)
    assert sample.spans == [Span(0, 2, V1), Span(2, 3, V2)]


@pytest.mark.parametrize(
    ("done", "max_response", "max_model_len", "left"),
    [(0, 10, 100, 10), (4, 10, 100, 6), (4, 10, 12, 5), (10, 10, 100, 0)],
)
def test_segment_asks_only_for_what_is_left(done, max_response, max_model_len, left):
    asked = Sampling(1.0, 1.0, -1, max_response, (2,), 0)
    group = GroupSpec("g", (1, 2, 3), asked, ())
    assert segment_sampling(group, SampleSpec(0, (5,) * done, 7), max_model_len).max_tokens == left


def test_segments_of_one_sample_have_different_seeds_and_the_first_has_its_own():
    group = GroupSpec("g", (1,), Sampling(1.0, 1.0, -1, 64, (), 0), ())
    seeds = [segment_sampling(group, SampleSpec(0, (5,) * done, 7), 100).seed for done in range(20)]
    assert seeds[0] == 7
    assert len({seed % 2**32 for seed in seeds}) == 20
