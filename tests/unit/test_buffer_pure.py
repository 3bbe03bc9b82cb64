"""The buffer's pure parts: filter, advantages, schedule, admission, against formulas written here."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.buffer.rewards import drop_reason, group_advantages, shuffled
from services.buffer.schedule import make_schedule
from services.buffer.states import MOVES, TERMINAL, State, admission_credit

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


@given(REWARDS)
def test_filter_keeps_what_spreads(rewards):
    spread = np.std(np.array(rewards, dtype=np.float64), ddof=1)
    if abs(spread - 1e-6) > 1e-9:
        assert (drop_reason("nonzero_std", rewards) == "") == bool(spread > 1e-6)
    assert drop_reason("none", rewards) == ""


def test_drop_reason_names_the_reward():
    assert drop_reason("nonzero_std", [1.0, 1.0]) == "zero_std_1.0"
    assert drop_reason("nonzero_std", [0.0, 0.0, 0.0]) == "zero_std_0.0"


@given(REWARDS)
def test_advantages_are_the_grpo_baseline(rewards):
    values = np.array(rewards, dtype=np.float64)
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    assert np.allclose(group_advantages(rewards), expected, rtol=1e-6, atol=1e-6)


@given(REWARDS, st.text(max_size=5))
def test_shuffling_only_permutes(rewards, seed):
    assert sorted(shuffled(rewards, seed)) == sorted(rewards)
    assert shuffled(rewards, seed) == shuffled(rewards, seed)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2)), min_size=12, max_size=40),
    st.integers(1, 3),
    st.integers(20, 120),
)
def test_schedule_covers_every_row_once_within_the_limit(rows, ranks, limit):
    lengths, steps = [n for n, _ in rows], [s for _, s in rows]
    plans = make_schedule(lengths, steps, ranks, limit)
    assert sorted(row for plan in plans for row in plan.rows) == list(range(len(rows)))
    for plan in plans:
        assert {steps[row] for row in plan.rows} <= {plan.optimizer_step}
        assert len(plan.rows) == 1 or sum(lengths[row] for row in plan.rows) <= limit
    for step in set(steps):
        per_rank = [sum(p.optimizer_step == step and p.data_parallel_rank == r for p in plans) for r in range(ranks)]
        assert len(set(per_rank)) == 1, "every rank has as many micro-batches"


def test_schedule_packs_first_fit():
    plans = make_schedule([100, 200, 300], [0, 0, 0], 1, 300)
    assert [plan.rows for plan in plans] == [[0, 1], [2]]


def credit(**changes: int) -> int:
    facts = {"live_step": 0, "kept": 0, "in_play": 0, "batch_size": 8, "over_sampling": 8, "max_staleness": 0}
    return admission_credit(**facts | {"num_rollout": 10} | changes)


def test_admission_bound():
    assert credit() == 8
    assert credit(in_play=8) == 0, "one batch is out"
    assert credit(kept=8) == 0, "and it stays out until the next live version"
    assert credit(live_step=1, kept=8) == 8
    assert credit(max_staleness=1) == 16
    assert credit(over_sampling=12) == 12
    assert credit(live_step=9, kept=72) == 8
    assert credit(live_step=10, kept=80) == 0, "nothing beyond the run"
    assert credit(live_step=2, kept=40) == -16, "after a rewind more is out than the bound allows"


def test_the_table_of_moves_is_closed_and_ends():
    assert set(MOVES) == set(State)
    assert all(targets <= set(State) for targets in MOVES.values())
    assert {state for state, targets in MOVES.items() if not targets} == TERMINAL
    reachable, frontier = {State.WAITING}, {State.WAITING}
    while frontier:
        frontier = {t for s in frontier for t in MOVES[s]} - reachable
        reachable |= frontier
    assert reachable == set(State)


def test_advantages_of_equal_rewards_are_zero():
    assert group_advantages([1.0, 1.0, 1.0]) == [0, 0, 0]
    assert all(math.isfinite(a) for a in group_advantages([0.0, 1e-9]))
