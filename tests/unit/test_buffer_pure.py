"""The buffer's pure parts: advantages, admission, against formulas written here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.buffer.rewards import group_advantages, shuffled
from services.buffer.states import MOVES, TERMINAL, State, admission_credit
from services.common.spec import RolloutSpec

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


@given(REWARDS)
def test_advantages_are_the_grpo_baseline(rewards):
    values = np.array(rewards, dtype=np.float64)
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    assert np.allclose(group_advantages(rewards), expected, rtol=1e-6, atol=1e-6)


@given(REWARDS, st.text(max_size=5))
def test_shuffling_only_permutes(rewards, seed):
    assert sorted(shuffled(rewards, seed)) == sorted(rewards)
    assert shuffled(rewards, seed) == shuffled(rewards, seed)


def credit(step: int = 0, kept: int = 0, in_play: int = 0, recent: tuple[int, int] = (0, 0), **rollout: Any) -> int:
    spec = RolloutSpec.model_validate({"num_rollout": 10, "rollout_batch_size": 8, "n_samples_per_prompt": 2} | rollout)
    return admission_credit(
        spec, step=step, kept=kept, in_play=in_play, recent_kept=recent[0], recent_decided=recent[1]
    )


def test_admission_bound():
    assert credit() == 8
    assert credit(in_play=8) == 0, "one batch is out"
    assert credit(kept=8) == 0, "and it stays out until the next live version"
    assert credit(step=1, kept=8) == 8
    assert credit(max_staleness=1) == 16
    assert credit(over_sampling_batch_size=12) == 12
    assert credit(step=9, kept=72) == 8
    assert credit(step=10, kept=80) == 0, "nothing beyond the run"
    assert credit(step=2, kept=40) == -16, "after a trainer went back more is out than the bound allows"


def test_refill_by_estimate_issues_what_the_keep_rate_says_is_missing():
    over: dict[str, Any] = {"over_sampling_batch_size": 16}
    assert credit(**over) == 16, "nothing is known: as many as are over-sampled"
    assert credit(kept=4, recent=(24, 24), **over) == 5, "nearly all are kept: 4 missing x 40 / 32"
    assert credit(kept=4, in_play=5, recent=(24, 24), **over) == 0
    assert credit(kept=4, recent=(0, 100), **over) == 12, "never more than the bound"
    assert credit(kept=8, recent=(0, 100), **over) == 0, "nothing is missing"


def test_refill_by_batch_issues_a_whole_over_sampling_batch():
    batch: dict[str, Any] = {"over_sampling_batch_size": 16, "refill": "batch"}
    assert credit(**batch) == 16
    assert credit(in_play=8, **batch) == 0, "enough can still be kept"
    assert credit(kept=3, in_play=4, **batch) == 16, "one is missing: a whole batch, outside the bound"


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
