"""The curves of a run as one picture; the only module that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from services.cli.records import Row, last_by
from services.cli.summary import running_mean

SIZE_INCHES = (11.0, 7.5)
DOTS_PER_INCH = 120
MEAN_WIDTH = 5
PARTS = (("rollout/seconds", "rollout"), ("train/seconds", "train"), ("time/publish_seconds", "publish"))
"""Of a step's time; keys of metrics.jsonl."""


def draw_curves(path: Path, title: str, metrics: Sequence[Row], evaluations: Sequence[Row]) -> None:
    """Write a PNG with reward, evaluation, log-prob gap and time of each step.

    Args:
        path: Where to.
        title: Over the picture.
        metrics: Rows of metrics.jsonl.
        evaluations: Rows of evaluations.jsonl.
    """
    matplotlib.use("Agg")
    steps = last_by(metrics, "step")
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title)
    reward, evaluation, gap, time = figure.subplots(2, 2).flat
    _draw_reward(reward, steps)
    _draw_evaluations(evaluation, last_by(evaluations, "name", "step"))
    _draw_gap(gap, steps)
    _draw_time(time, steps)
    for axes in (reward, evaluation, gap, time):
        axes.set_xlabel("rollout step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _points(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """x and y of a key, over those rows that have it."""
    having = [row for row in rows if row.get(key) is not None]
    return [row["step"] for row in having], [row[key] for row in having]


def _draw_reward(axes: Axes, steps: Sequence[Row]) -> None:
    x, y = _points(steps, "rollout/mean_reward")
    axes.plot(x, y, color="tab:blue", alpha=0.35, marker=".", label="each step")
    axes.plot(x, running_mean(y, MEAN_WIDTH), color="tab:blue", linewidth=2, label=f"mean of {MEAN_WIDTH} steps")
    axes.set(title="Training reward (all graded samples)", ylabel="mean reward")
    axes.legend()


def _draw_evaluations(axes: Axes, evaluations: Sequence[Row]) -> None:
    axes.set(title="Held-out evaluation", ylabel="mean reward")
    for name in sorted({row["name"] for row in evaluations}):
        x, y = _points([row for row in evaluations if row["name"] == name], "mean_reward")
        axes.plot(x, y, marker="o", label=name)
        for at, below in ((0, -15), (-1, 7)):
            axes.annotate(f"{y[at]:.2f}", (x[at], y[at]), xytext=(0, below), textcoords="offset points", ha="center")
    if evaluations:
        axes.margins(x=0.08, y=0.15)
        axes.legend()


def _draw_gap(axes: Axes, steps: Sequence[Row]) -> None:
    x, y = _points(steps, "train/log_prob_gap_mean")
    axes.plot(x, y, color="tab:red", marker=".")
    axes.set(title="Engine against trainer", ylabel="mean |log-prob gap| per token (nats)")
    axes.set_ylim(bottom=0)


def _draw_time(axes: Axes, steps: Sequence[Row]) -> None:
    x = [row["step"] for row in steps]
    below = [0.0] * len(steps)
    for key, label in PARTS:
        height = [row.get(key) or 0.0 for row in steps]
        axes.bar(x, height, bottom=below, width=0.9, label=label)
        below = [low + high for low, high in zip(below, height, strict=True)]
    axes.set(title="Time of a step", ylabel="seconds")
    axes.margins(y=0.15)
    axes.legend(ncols=len(PARTS), loc="upper center")
