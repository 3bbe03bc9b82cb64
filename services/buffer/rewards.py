"""Pure functions on the rewards of a group: the dynamic-sampling filter, the baseline, the control experiment."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

MIN_STD = 1e-6
"""A group whose rewards spread less teaches nothing: every advantage would be 0."""
STD_EPSILON = 1e-6
"""Keeps the division finite."""


def drop_reason(filter_name: str, rewards: Sequence[float]) -> str:
    """Why a group is dropped; '' keeps it.

    `nonzero_std` is DAPO's dynamic sampling (arXiv 2503.14476): keep if the unbiased std exceeds 1e-6.
    """
    if filter_name == "nonzero_std" and statistics.stdev(rewards) <= MIN_STD:
        return f"zero_std_{round(rewards[0], 1)}"
    return ""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (unbiased std + 1e-6), for each sample of a group (GRPO, arXiv 2402.03300)."""
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + STD_EPSILON) for reward in rewards]


def shuffled(rewards: Sequence[float], seed: str) -> list[float]:
    """The rewards in another order, fixed by the seed."""
    out = list(rewards)
    random.Random(seed).shuffle(out)
    return out
