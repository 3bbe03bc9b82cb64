"""Did the run learn? Judged by the rewards in its metrics.jsonl. Pure, but for reading that file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from services.cli.records import METRICS_FILE, last_by, read_rows

WINDOW_STEPS = 5
"""Rewards are averaged over so many steps, since one step's is noisy."""
TARGET_REWARD = 0.8
QUICK_RISE = 0.1


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether the reward did what it should, in words."""

    passed: bool
    words: str


def read_rewards(run_dir: Path) -> list[float]:
    """Mean reward of every finished step, in order."""
    steps = last_by(read_rows(run_dir / METRICS_FILE), "step")
    return [row["rollout/mean_reward"] for row in steps if row.get("rollout/mean_reward") is not None]


def judge(rewards: list[float], *, quick: bool) -> Judgement:
    """The full demo must reach TARGET_REWARD over some WINDOW_STEPS; the quick one must rise by QUICK_RISE."""
    if not rewards:
        return Judgement(False, "no step was finished")
    windows = window_means(rewards)
    if quick:
        rise = windows[-1] - windows[0]
        return Judgement(rise >= QUICK_RISE, f"reward rose by {rise:.2f}, wanted {QUICK_RISE}")
    best = max(windows)
    return Judgement(
        best >= TARGET_REWARD, f"best mean reward of {WINDOW_STEPS} steps {best:.2f}, wanted {TARGET_REWARD}"
    )


def window_means(rewards: list[float]) -> list[float]:
    """Means over WINDOW_STEPS steps at a time; of what there is if it is less."""
    width = min(WINDOW_STEPS, len(rewards))
    return [fmean(rewards[start : start + width]) for start in range(len(rewards) - width + 1)]
