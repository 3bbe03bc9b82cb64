"""Pure functions on the rewards of a group: the baseline, and the control experiment."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

STD_EPSILON = 1e-6
"""Keeps the division finite."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (unbiased std + 1e-6), for each sample of a group (GRPO, arXiv 2402.03300)."""
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + STD_EPSILON) for reward in rewards]


def shuffled(rewards: Sequence[float], seed: str) -> list[float]:
    """The rewards in another order, fixed by the seed."""
    out = list(rewards)
    random.Random(seed).shuffle(out)
    return out
