"""The gateway's pure parts: spans, the engine table, routing, the growth of a sample. Nothing is faked."""

from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import NotFound
from services.rollout_gateway import buffer_client
from services.rollout_gateway.engine.generation import GroupSpec, SampleSpec, segment_sampling
from services.rollout_gateway.engine.vllm_engine import Sampling
from services.rollout_gateway.group import Finish, Fragment, Group, SampleProgress, SamplingParams
from services.rollout_gateway.registry import Engine, EngineState, EngineTable
from services.rollout_gateway.router import Router
from services.rollout_gateway.spans import Span, Version, joined, loss_mask, spans_between
from services.rollout_gateway.work import most_groups
from tests.unit.gateway_peers import make_spec

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
    assert router.pick(engines, V3) is engines[3]
    assert router.pick(engines, Version(1, 3)) is None
    assert router.capacity(engines) == 3 * 16


def test_router_sends_nothing_to_a_full_engine_until_places_are_free():
    router, one = Router(limit=10), engine("a")
    router.take(one, 8)
    assert router.pick([one], None) is one
    router.take(one, 8)
    assert router.pick([one], None) is None
    router.give_back(one, 7)
    assert router.pick([one], None) is one


def grown(*tokens: int, version: Version = V1, **fields: Any) -> SampleProgress:
    """A sample with tokens of one version; `fields` as those of the record."""
    log_probs = [-token / 10 for token in tokens]
    return SampleProgress(0, 5, list(tokens), log_probs, [Span(0, len(tokens), version)] if tokens else [], **fields)


def test_progress_is_continued_on_the_same_version():
    sample = SampleProgress(0, seed=5)
    sample.begin_segment(V1, continue_across_versions=False)
    sample.extend([1, 2], [-0.1, -0.2], [Span(0, 2, V1)], None)
    sample.begin_segment(V1, continue_across_versions=False)
    sample.extend([3], [-0.3], [Span(0, 1, V1)], Finish.STOP)
    assert sample == grown(1, 2, 3, finish=Finish.STOP, segment_begin=2)


def test_progress_of_another_version_is_dropped_but_not_what_the_lease_brought():
    sample = grown(1, 2, kept=2, saved=2)
    sample.begin_segment(V2, continue_across_versions=False)
    sample.extend([3, 4], [-0.3, -0.4], [Span(0, 1, V2), Span(1, 2, V3)], None)
    sample.begin_segment(V1, continue_across_versions=False)
    assert sample == grown(1, 2, kept=2, saved=2, segment_begin=2)
    sample.extend([9], [-0.9], [Span(0, 1, V2)], Finish.LENGTH)
    assert sample.spans == [Span(0, 2, V1), Span(2, 3, V2)]


def test_step_that_comes_again_in_another_epoch_costs_no_tokens():
    sample = grown(1, 2, version=V2)
    sample.begin_segment(V3, continue_across_versions=False)
    assert sample.token_ids == [1, 2]


def test_progress_is_continued_by_any_version_where_the_lease_allows_it():
    sample = grown(1, 2)
    sample.begin_segment(V2, continue_across_versions=True)
    sample.extend([3], [-0.3], [Span(0, 1, V2)], None)
    assert sample.spans == [Span(0, 2, V1), Span(2, 3, V2)]


def test_fragments_follow_one_another_and_their_spans_count_from_the_start():
    sample = grown(1, 2, kept=2, saved=2)
    sample.begin_segment(V2, continue_across_versions=True)
    sample.extend([3, 4], [-0.3, -0.4], [Span(0, 2, V2)], None)
    first = sample.unsaved()
    assert first == Fragment(0, 2, [3, 4], [-0.3, -0.4], [Span(2, 4, V2)])
    sample.extend([5], [-0.5], [Span(2, 3, V2)], None)
    sample.note_saved(first)
    assert sample.unsaved() == Fragment(0, 4, [5], [-0.5], [Span(4, 5, V2)])
    sample.note_saved(sample.unsaved())
    assert sample.unsaved().token_ids == []


@pytest.mark.parametrize("regrown", [1, 3])
def test_fragment_that_was_cut_back_on_its_way_is_not_taken_for_saved(regrown):
    sample = grown(1, kept=1, saved=1)
    sample.extend([2, 3], [-0.2, -0.3], [Span(1, 3, V1)], None)
    on_its_way = sample.unsaved()
    sample.begin_segment(V2, continue_across_versions=False)
    sample.extend([2, 3, 4][:regrown], [-0.2, -0.3, -0.4][:regrown], [Span(0, regrown, V2)], None)
    sample.note_saved(on_its_way)
    assert sample.unsaved().begin == 1
    assert len(sample.unsaved().token_ids) == regrown


def test_cut_behind_what_is_saved_sends_from_the_cut_again():
    sample = grown(1, 2, 3, kept=1, saved=3)
    late = Fragment(0, 2, [3], [-0.3], [Span(2, 3, V1)])
    sample.begin_segment(V2, continue_across_versions=False)
    assert (sample.token_ids, sample.saved) == ([1], 1)
    sample.note_saved(late)
    assert sample.saved == 1


def test_group_saves_only_what_is_new_of_unfinished_samples():
    done, new, old = grown(1, 2, finish=Finish.STOP), grown(1, 2), grown(1, 2, saved=2)
    for index, sample in enumerate((done, new, old)):
        sample.index = index
    group = Group("g", (7,), SamplingParams(1.0, 1.0, -1, 16, ()), [done, new, old])
    fragments = group.unsaved()
    assert [(one.index, one.begin, one.end) for one in fragments] == [(1, 0, 2)]
    group.note_saved(fragments)
    assert group.unsaved() == []


def test_portions_keep_the_order_and_the_limit(monkeypatch):
    monkeypatch.setattr(buffer_client, "PORTION_TOKENS", 10)
    assert buffer_client.portions([4, 6, 1, 25, 3, 3], int) == [[4, 6], [1], [25], [3, 3]]
    assert buffer_client.portions([], int) == []


@pytest.mark.parametrize(("samples", "response", "most"), [(8, 1000, 520), (16, 32768, 7), (1024, 32768, 1)])
def test_leases_of_one_call_fit_into_a_message(samples, response, most):
    spec = make_spec(buffer_port=1, n_samples=samples)
    rollout = spec.rollout.model_copy(update={"max_response_tokens": response})
    assert most_groups(spec.model_copy(update={"rollout": rollout})) == most


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([Span(0, 3, V1)], [1, 1, 1]),
        ([Span(0, 2, V1), Span(2, 3, V2), Span(3, 5, V3)], [0, 0, 1, 1, 1]),
        ([Span(0, 1, V3), Span(1, 2, V1), Span(2, 3, V2)], [1, 0, 1]),
    ],
)
def test_mask_leaves_out_tokens_of_older_steps_than_the_last(spans, expected):
    assert loss_mask(spans, mask_offpolicy=True) == expected
    assert loss_mask(spans, mask_offpolicy=False) == [1] * len(expected)


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
