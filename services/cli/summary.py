"""The numbers of a run, from its files. Pure: rows in, one table out; what a run did not write is left out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from services.cli.records import Row, SupervisorRecord, last_by

EDGE_STEPS = 5
"""Steps in the means at the beginning and at the end."""


def summarise(
    metrics: Sequence[Row], evaluations: Sequence[Row], weight_sync: Sequence[Row], record: SupervisorRecord | None
) -> dict[str, Any]:
    """What report.json holds; medians are over steps."""
    steps = last_by(metrics, "step")
    summary: dict[str, Any] = {"steps": len(steps)}
    if rewards := column(steps, "rollout/mean_reward"):
        summary["reward"] = {"first_5": fmean(rewards[:EDGE_STEPS]), "last_5": fmean(rewards[-EDGE_STEPS:])}
    for part in ("rollout", "train"):
        if values := column(steps, f"{part}/tokens_per_second"):
            summary[f"{part}_tokens_per_second"] = median(values)
    if gaps := column(steps, "train/log_prob_gap_mean"):
        summary["log_prob_gap_mean_max"] = max(gaps)
    if evaluations:
        summary["evaluations"] = before_and_after(evaluations)
    if weight_sync:
        summary["weight_sync"] = summarise_sync(weight_sync)
    if record:
        summary |= {
            "outcome": record.outcome,
            "wall_seconds": record.wall_seconds,
            "peak_memory_bytes": record.peak_memory_bytes,
            "restarts": record.restarts,
        }
    return summary


def before_and_after(evaluations: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """First and last evaluation of each data set."""
    result: dict[str, dict[str, Row]] = {}
    keep = ("step", "mean_reward", "scored", "failed", "mean_response_tokens")
    for row in last_by(evaluations, "name", "step"):
        short = {key: row[key] for key in keep if key in row}
        result.setdefault(row["name"], {"before": short})["after"] = short
    return result


def summarise_sync(rows: Sequence[Row]) -> dict[str, Any]:
    """How the weights travelled; every attempt that ended counts."""
    summary: dict[str, Any] = {"transfers": len(rows), "digests_equal": sum(bool(row.get("equal")) for row in rows)}
    for key in ("wire_seconds", "load_seconds", "total_seconds", "wire_bytes", "plain_bytes"):
        if values := column(rows, key):
            summary[f"median_{key}"] = median(values)
    return summary


def column(rows: Sequence[Row], key: str) -> list[float]:
    """The values of a key, from those rows that have it."""
    return [row[key] for row in rows if row.get(key) is not None]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to `width - 1` before it; as long as `values`."""
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]
