"""Did the run learn? Judged by the rewards in its metrics.jsonl. Pure, but for reading that file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from services.cli.records import EVALUATIONS_FILE, METRICS_FILE, last_by, read_rows

WINDOW_STEPS = 5
"""Rewards are averaged over so many steps, since one step's is noisy."""
TARGET_REWARD = 0.8
TARGET_GAIN = 0.25
QUICK_RISE = 0.1
CONTROL_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether the reward did what it should, in words."""

    passed: bool
    words: str


def read_rewards(run_dir: Path) -> list[float]:
    """Mean reward of every finished step, in order."""
    steps = last_by(read_rows(run_dir / METRICS_FILE), "step")
    return [row["rollout/mean_reward"] for row in steps if row.get("rollout/mean_reward") is not None]


def read_gain(run_dir: Path) -> float:
    """Mean reward of the last held-out evaluation minus that of the first; 0 without evaluations."""
    rows = last_by(read_rows(run_dir / EVALUATIONS_FILE), "step")
    return rows[-1]["mean_reward"] - rows[0]["mean_reward"] if rows else 0.0


def judge(rewards: list[float], gain: float) -> Judgement:
    """The demo must reach TARGET_REWARD over some WINDOW_STEPS, and get better on held-out problems."""
    best = max(window_means(rewards), default=0.0)
    return Judgement(
        best >= TARGET_REWARD and gain >= TARGET_GAIN,
        f"best mean reward of {WINDOW_STEPS} steps {best:.2f} (wanted {TARGET_REWARD}), "
        f"held-out gain {gain:+.2f} (wanted {TARGET_GAIN})",
    )


def judge_quick(rewards: list[float]) -> Judgement:
    """In a few steps the reward must rise by QUICK_RISE."""
    windows = window_means(rewards) or [0.0]
    rise = windows[-1] - windows[0]
    return Judgement(rise >= QUICK_RISE, f"reward rose by {rise:.2f} (wanted {QUICK_RISE})")


def judge_control(gain: float) -> Judgement:
    """With rewards that say nothing, nothing may be learned."""
    return Judgement(gain < CONTROL_GAIN, f"control: held-out gain {gain:+.2f} (must stay under {CONTROL_GAIN})")


def window_means(rewards: list[float]) -> list[float]:
    """Means over WINDOW_STEPS steps at a time; of what there is if it is less."""
    width = min(WINDOW_STEPS, len(rewards))
    if not width:
        return []
    return [fmean(rewards[start : start + width]) for start in range(len(rewards) - width + 1)]
