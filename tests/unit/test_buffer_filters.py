"""Dynamic-sampling filters and buffer filters. The hooks are functions of this file; nothing is faked."""

from __future__ import annotations

import asyncio
import math
import threading
from enum import StrEnum
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.buffer.filters import (
    BUILT_IN,
    BufferedGroup,
    GroupFilter,
    SampledGroup,
    SampledSample,
    choose,
    decide,
    load_buffer_filter,
    load_filter,
    nonzero_std,
)
from services.buffer.hooks import HookFailed
from services.common.spec import SpecError

FAILURES = "flotilla_buffer_hook_failures_total"
REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def group_of(*rewards, group_id="g00000007") -> SampledGroup:
    samples = [SampledSample(i, "", 5, reward, "SCORED", "CORRECT", False, 0) for i, reward in enumerate(rewards)]
    return SampledGroup(group_id, "", "42", tuple(samples))


def buffered(*group_ids: str) -> list[BufferedGroup]:
    return [BufferedGroup(group_id, 1, "42", 1, 0, 10, 3, 1) for group_id in group_ids]


def failures(hook: str) -> float:
    return REGISTRY.get_sample_value(FAILURES, {"hook": hook}) or 0.0


# ---------------------------------------------------------------------------------------------------- nonzero_std


@given(REWARDS)
def test_nonzero_std_is_the_exact_unbiased_std(rewards):
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact) / len(exact)
    variance = sum((reward - mean) ** 2 for reward in exact) / (len(exact) - 1)
    if abs(variance - Fraction(1, 10**12)) > Fraction(1, 10**20):
        assert nonzero_std(group_of(*rewards))[0] == (variance > Fraction(1, 10**12))


@pytest.mark.parametrize("size", [2, 3, 8, 1024])
@pytest.mark.parametrize("reward", [0.0, 0.1, -0.3, 1 / 3, 1e16, 1e300])
def test_equal_rewards_never_spread(size, reward):
    """Rounding of the mean must not look like a spread: in float64, the std of 1024 times 0.1 is not 0."""
    assert nonzero_std(group_of(*[reward] * size)) == (False, f"zero_std_{round(reward, 1)}")


def test_a_large_mean_hides_no_spread():
    assert nonzero_std(group_of(1e9, 1e9 + 1e-5, 1e9))[0]
    assert nonzero_std(group_of(1e15, 1e15 + 0.125))[0]
    assert nonzero_std(group_of(2.0**53, 2.0**53 + 2))[0]


def test_the_boundary_is_dropped_and_the_next_float_is_kept():
    below = 1e-6 * math.sqrt(2)
    assert nonzero_std(group_of(0.0, np.nextafter(below, 0)))[0] is False
    assert nonzero_std(group_of(0.0, np.nextafter(below, 1)))[0] is True


def test_the_reason_has_the_first_reward_with_one_digit():
    assert nonzero_std(group_of(1.0, 1.0)) == (False, "zero_std_1.0")
    assert nonzero_std(group_of(0, 0, 0)) == (False, "zero_std_0.0"), "a reward may be an int"
    assert nonzero_std(group_of(0.25, 0.25 + 1e-7)) == (False, "zero_std_0.2")
    assert nonzero_std(group_of(1.0, 0.0)) == (True, "")


def test_a_group_of_one_has_no_spread():
    assert nonzero_std(group_of(1.0)) == (False, "zero_std_1.0")


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("name", list(BUILT_IN))
async def test_a_reward_that_is_no_finite_number_is_named(name, reward):
    group = group_of(1.0, 0.0, reward)
    with pytest.raises(ValueError, match=r"the reward of sample 2 of group g00000007 is (nan|inf|-inf|None)"):
        _ = group.rewards
    with pytest.raises(HookFailed, match="sample 2 of group g00000007"):
        await decide(load_filter(name), group)


# ---------------------------------------------------------------------------------------------------- by name


async def test_built_in_filters():
    same, spread = group_of(1.0, 1.0), group_of(1.0, 0.0)
    assert await decide(load_filter("none"), same) == (True, "")
    assert await decide(load_filter("nonzero_std"), same) == (False, "zero_std_1.0")
    assert await decide(load_filter("nonzero_std_with_fallback"), same) == (False, "zero_std_1.0")
    assert await decide(load_filter("nonzero_std_with_fallback"), spread) == (True, "")
    assert [name for name in BUILT_IN if load_filter(name).keep_when_insufficient] == ["nonzero_std_with_fallback"]
    assert not any(load_filter(name).needs_text for name in BUILT_IN)


def test_filters_of_a_user_are_found_by_path():
    found = load_filter(f"{__name__}:lucky")
    assert (found.function, found.keep_when_insufficient, found.needs_text) == (lucky, False, True)
    assert load_buffer_filter(f"{__name__}:youngest_first") is youngest_first
    with pytest.raises(SpecError, match=r"rollout\.dynamic_sampling_filter: module .* has no unlucky"):
        load_filter(f"{__name__}:unlucky")
    with pytest.raises(SpecError, match=r"rollout\.buffer_filter: cannot import nowhere: ModuleNotFoundError"):
        load_buffer_filter("nowhere:anything")


# ---------------------------------------------------------------------------------------------------- hooks that filter


class Reason(StrEnum):
    UNLUCKY = "unlucky"


def lucky(group: SampledGroup) -> tuple[bool, str]:
    return sum(group.rewards) == 7, Reason.UNLUCKY


async def lucky_after_a_while(group: SampledGroup) -> tuple[bool, str]:
    await asyncio.sleep(0.001)
    return lucky(group)


@pytest.mark.parametrize("function", [lucky, lucky_after_a_while])
async def test_a_hook_decides(function):
    group_filter = GroupFilter(function, needs_text=True)
    assert await decide(group_filter, group_of(3.0, 4.0)) == (True, ""), "what is kept has no reason"
    assert await decide(group_filter, group_of(3.0, 3.0)) == (False, "unlucky")


async def test_a_drop_without_a_reason_gets_one():
    assert await decide(GroupFilter(lambda group: (False, ""), needs_text=True), group_of(1.0)) == (False, "no_reason")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, r"returned NoneType; it must return \(keep, reason\), a bool and a str"),
        (True, "returned bool;"),
        ((True,), r"returned tuple of \(bool\);"),
        ((1, ""), r"returned tuple of \(int, str\);"),
        ((np.bool_(True), ""), r"returned tuple of \(numpy\.bool_?, str\);"),
        ((False, None), r"returned tuple of \(bool, NoneType\);"),
        ((False, "x" * 65), "reason that is not one line of at most 64 characters"),
        ((False, "two\nlines"), "reason that is not one line"),
        ((False, "half a pair \ud800"), "reason that is not one line"),
    ],
)
async def test_a_decision_that_is_none_fails_with_the_name_of_the_hook(answer, text):
    before = failures("dynamic_sampling_filter")
    with pytest.raises(HookFailed, match=f"^{__name__}:<lambda> .*{text}"):
        await decide(GroupFilter(lambda group: answer, needs_text=True), group_of(1.0, 0.0))
    assert failures("dynamic_sampling_filter") == before + 1


# ---------------------------------------------------------------------------------------------------- buffer filters


def youngest_first(step: int, groups, wanted: int) -> list[str]:
    assert (step, wanted) == (4, 2)
    return [group.group_id for group in reversed(groups)]


async def test_a_buffer_filter_chooses_and_too_many_are_cut():
    assert await choose(youngest_first, 4, buffered("a", "b", "c"), 2) == ["c", "b"]


async def test_a_buffer_filter_may_choose_none():
    assert await choose(lambda step, groups, wanted: (), 4, buffered("a"), 1) == []


@pytest.mark.parametrize(
    "answer", [None, "ab", [1], ["a", "x"], ["a", "a"], buffered("a"), {"a"}, [["a"]], RuntimeError("broken")]
)
async def test_without_a_usable_choice_the_oldest_go_first(answer):
    def hook(step: int, groups, wanted: int):
        if isinstance(answer, Exception):
            raise answer
        return answer

    before = failures("buffer_filter")
    assert await choose(hook, 4, buffered("a", "b", "c"), 2) == ["a", "b"]
    assert failures("buffer_filter") == before + 1


async def test_a_buffer_filter_that_takes_too_long_starves_nobody():
    release = threading.Event()

    def hook(step: int, groups, wanted: int) -> list[str]:
        release.wait(60)
        return ["c"]

    assert await choose(hook, 4, buffered("a", "b", "c"), 2, deadline_s=0.05) == ["a", "b"]
    release.set()
