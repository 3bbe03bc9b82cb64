"""Packing and the data-parallel schedule against their laws. Nothing is faked."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.packing import first_fit, round_up
from services.common.partition import partition
from services.common.schedule import Layout, Schedule, make_schedule

ROWS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2)), min_size=1, max_size=60)
LAYOUTS = st.builds(
    Layout,
    data_parallel_size=st.integers(1, 5),
    max_tokens_per_micro_batch=st.integers(10, 80),
    context_parallel_size=st.integers(1, 3),
    micro_batch_multiple=st.integers(1, 3),
    balance_data=st.booleans(),
    flops_per_token=st.sampled_from([0.0, 3.0]),
    flops_per_token_squared=st.sampled_from([0.0, 0.5]),
)


def rows_of(schedule: Schedule) -> list[tuple[int, ...]]:
    return [one.rows for one in schedule.micro_batches]


@given(ROWS, LAYOUTS)
def test_the_laws_of_a_schedule(rows: list[tuple[int, int]], layout: Layout):
    lengths, steps = [n for n, _ in rows], [s for _, s in rows]
    plans = make_schedule(lengths, steps, layout).micro_batches
    assert sorted(row for plan in plans for row in plan.rows) == list(range(len(rows))), "every row once"
    for plan in plans:
        assert {steps[row] for row in plan.rows} <= {plan.optimizer_step}
        assert len(plan.rows) <= 1 or sum(lengths[row] for row in plan.rows) <= layout.capacity
        assert list(plan.rows) == sorted(plan.rows), "in input order"
    for step in set(steps):
        mine = [plan for plan in plans if plan.optimizer_step == step]
        counts = {sum(p.data_parallel_rank == rank for p in mine) for rank in range(layout.data_parallel_size)}
        assert len(counts) == 1, "every rank has as many micro-batches"
        assert counts.pop() % layout.micro_batch_multiple == 0
        if any(not plan.rows for plan in mine):
            assert all(len(plan.rows) <= 1 for plan in mine), "empty ones only where nothing can be split"


@given(ROWS, LAYOUTS)
def test_the_figures_of_a_schedule(rows: list[tuple[int, int]], layout: Layout):
    lengths, steps = [n for n, _ in rows], [s for _, s in rows]
    schedule = make_schedule(lengths, steps, layout)
    fill = [min(1.0, sum(lengths[row] for row in one) / layout.capacity) for one in rows_of(schedule)]
    assert schedule.stats.packing_efficiency == pytest.approx(sum(fill) / len(fill))
    a, b = layout.flops_per_token, layout.flops_per_token_squared
    ratios = []
    for step in set(steps):
        work = [0.0] * layout.data_parallel_size
        for plan in schedule.micro_batches:
            if plan.optimizer_step == step:
                work[plan.data_parallel_rank] += sum(
                    a * lengths[row] + b * lengths[row] ** 2 if a or b else lengths[row] for row in plan.rows
                )
        ratios.append(max(work) / (sum(work) / len(work)))
    assert schedule.stats.imbalance == pytest.approx(sum(ratios) / len(ratios))


def test_first_fit_by_hand():
    assert rows_of(make_schedule([100, 200, 300], [0, 0, 0], Layout(1, 300))) == [(0, 1), (2,)]
    assert first_fit(range(5), [200, 200, 100, 100, 50], 300) == [[0, 2], [1, 3], [4]]
    assert first_fit([4, 2], [0, 0, 7, 0, 7], 14) == [[4, 2]], "in the order given"


def test_a_row_over_the_limit_goes_alone():
    lengths = [100, 301, 200, 1000, 300]
    schedule = make_schedule(lengths, [0] * 5, Layout(1, 300))
    assert rows_of(schedule) == [(0, 2), (1,), (3,), (4,)]
    assert schedule.stats.packing_efficiency == 1, "each fills a micro-batch"
    assert rows_of(make_schedule(lengths, [0] * 5, Layout(1, 300, context_parallel_size=2))) == [(0, 1), (2, 4), (3,)]


def test_the_heaviest_are_split_until_every_rank_has_as_many():
    lengths = [100, 100, 50, 40, 30, 20]
    assert first_fit(range(6), lengths, 200) == [[0, 1], [2, 3, 4, 5]]
    assert round_up([[0, 1], [2, 3, 4, 5]], lengths, 3) == [[0], [2, 3, 4, 5], [1]]
    assert round_up([[0, 1], [2, 3, 4, 5]], lengths, 4) == [[0], [2, 5], [1], [3, 4]]
    assert round_up([[0], [1]], lengths, 4) == [[0], [1], [], []]


def test_ranks_take_turns_unless_balanced():
    lengths = [8, 7, 6, 5, 5, 4]
    strided = make_schedule(lengths, [0] * 6, Layout(2, 8))
    assert [(one.data_parallel_rank, one.rows) for one in strided.micro_batches] == [
        (0, (0,)), (0, (2,)), (0, (4,)), (1, (1,)), (1, (3,)), (1, (5,)),
    ]  # fmt: skip
    assert strided.stats.imbalance == pytest.approx(19 / 17.5)
    balanced = make_schedule(lengths, [0] * 6, Layout(2, 8, balance_data=True))
    assert balanced.stats.imbalance == pytest.approx(18 / 17.5)
    for rank in range(2):
        mine = [lengths[one.rows[0]] for one in balanced.micro_batches if one.data_parallel_rank == rank]
        assert mine == sorted(mine, reverse=True), "heaviest first"


def test_work_is_that_of_the_flops():
    """Two micro-batches of 40 tokens: one sample of 40, or four of 10, which attend to far less."""
    lengths = [40, 10, 10, 10, 10]
    assert make_schedule(lengths, [0] * 5, Layout(2, 40)).stats.imbalance == 1
    squared = Layout(2, 40, flops_per_token=1.0, flops_per_token_squared=1.0)
    assert make_schedule(lengths, [0] * 5, squared).stats.imbalance == pytest.approx(1640 / 1040)


@given(st.integers(1, 6), st.integers(0, 12), st.data())
def test_parts_are_as_many_items_each(parts: int, size: int, data: st.DataObject):
    count = parts * size
    weights = data.draw(st.lists(st.floats(0, 1e15), min_size=count, max_size=count))
    found = partition(weights, parts)
    assert sorted(item for one in found for item in one) == list(range(count))
    assert [len(one) for one in found] == [size] * parts
    sums = [sum(weights[item] for item in one) for one in found]
    assert max(sums) - min(sums) <= max(weights, default=0) * (1 + 1e-9), "differencing never spreads beyond one item"


def test_differencing_by_hand():
    """8, 7, 6, 5, 4 in two parts, with a 0 for an equal count: pairs (8, 7), (6, 5), (4, 0) leave 4, 1, 1, then 2."""
    weights = [8, 7, 6, 5, 4, 0]
    assert sorted(sum(weights[item] for item in one) for one in partition(weights, 2)) == [14, 16]


def test_balanced_ranks_beat_turns():
    draw = random.Random(5)
    gaps = {True: 0.0, False: 0.0}
    wins, cases = 0, 200
    for _ in range(cases):
        lengths = [draw.randint(1, 4000) for _ in range(draw.randint(16, 128))]
        ranks, limit = draw.choice([2, 4, 8]), draw.choice([4096, 8192])
        found = {
            balance: make_schedule(lengths, [0] * len(lengths), Layout(ranks, limit, 1, 1, balance, 1.0, 1e-3)).stats
            for balance in gaps
        }
        assert found[True].packing_efficiency == found[False].packing_efficiency
        for balance, stats in found.items():
            gaps[balance] += (stats.imbalance - 1) / cases
        wins += found[True].imbalance <= found[False].imbalance + 1e-12
    assert gaps[True] < gaps[False] / 2
    assert wins > 0.95 * cases


@pytest.mark.parametrize(("rows", "bound_s"), [(1024, 0.25), (128 * 256, 4.0)])
def test_a_large_batch_takes_no_time(rows: int, bound_s: float):
    draw = random.Random(1)
    lengths = [draw.randint(1, 4096) for _ in range(rows)]
    layout = Layout(32, 8192, micro_batch_multiple=4, balance_data=True, flops_per_token_squared=1.0)
    begun = time.thread_time()
    make_schedule(lengths, [0] * rows, layout)
    assert time.thread_time() - begun < bound_s
