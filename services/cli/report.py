"""`flotilla report`: curves, transcripts and numbers of a run, from whatever files it has written so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.cli.curves import draw_curves
from services.cli.records import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    WEIGHT_SYNC_FILE,
    evaluated_answers,
    read_rows,
    read_supervisor,
)
from services.cli.summary import summarise
from services.cli.transcripts import choose_pairs, match_pairs, render_transcripts
from services.cli.view import duration_text, memory_text
from services.common.spec import SpecError

REPORT_DIR = "report"
MIB = 1 << 20


def write_report(run_id: str, run_dir: Path) -> str:
    """Write run_dir/report; returns its Markdown text."""
    if not run_dir.is_dir():
        raise SpecError(f"{run_dir}: there is no such run directory; start the run first, with flotilla up")
    metrics = read_rows(run_dir / METRICS_FILE)
    evaluations = read_rows(run_dir / EVALUATIONS_FILE)
    weight_sync = read_rows(run_dir / WEIGHT_SYNC_FILE)
    summary = {"run_id": run_id} | summarise(metrics, evaluations, weight_sync, read_supervisor(run_dir))
    out = run_dir / REPORT_DIR
    out.mkdir(exist_ok=True)
    (out / "report.json").write_text(json.dumps(summary, indent=1) + "\n")
    if metrics or evaluations:
        draw_curves(out / "curves.png", f"Run {run_id}", metrics, evaluations)
    transcripts = make_transcripts(run_id, run_dir)
    if transcripts:
        (out / "transcripts.md").write_text(transcripts)
    text = render_report(summary, curves=bool(metrics or evaluations), transcripts=bool(transcripts))
    (out / "report.md").write_text(text)
    return text


def make_transcripts(run_id: str, run_dir: Path) -> str:
    """Markdown of the same prompts in the first and the last evaluation; empty if there are no two."""
    answers = evaluated_answers(run_dir)
    if len(answers) < 2:
        return ""
    first, last = min(answers), max(answers)
    pairs = choose_pairs(match_pairs(answers[first], answers[last]))
    return render_transcripts(run_id, pairs, first, last) if pairs else ""


def render_report(summary: dict[str, Any], *, curves: bool, transcripts: bool) -> str:
    """The numbers as a Markdown page."""
    lines = [f"# Report of {summary['run_id']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in _report_rows(summary)]
    if curves:
        lines += ["", "![curves](curves.png)"]
    if transcripts:
        lines += ["", "[Transcripts](transcripts.md): the same prompts before and after."]
    return "\n".join(lines) + "\n"


def _report_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("rollout steps", str(summary["steps"]))]
    if reward := summary.get("reward"):
        rows.append(("training reward, first 5 / last 5 steps", f"{reward['first_5']:.3f} / {reward['last_5']:.3f}"))
    for name, one in summary.get("evaluations", {}).items():
        before, after = one["before"], one["after"]
        words = (
            f"{before['mean_reward']:.3f} (step {before['step']}) / {after['mean_reward']:.3f} (step {after['step']})"
        )
        rows.append((f"evaluation {name}, before / after", words))
    for key, words in (("rollout_tokens_per_second", "rollout"), ("train_tokens_per_second", "training")):
        if key in summary:
            rows.append((f"{words} tokens/s, median", f"{summary[key]:,.0f}"))
    if "log_prob_gap_mean_max" in summary:
        rows.append(("log-prob gap, mean of a step, largest of all steps", f"{summary['log_prob_gap_mean_max']:.4f}"))
    if sync := summary.get("weight_sync"):
        rows += _sync_rows(sync)
    if "outcome" in summary:
        restarts = ", ".join(f"{name} {count}" for name, count in summary["restarts"].items()) or "none"
        rows += [
            ("peak memory of all processes", memory_text(summary["peak_memory_bytes"])),
            ("restarts", restarts),
            ("wall time", duration_text(summary["wall_seconds"])),
            ("outcome", summary["outcome"]),
        ]
    return rows


def _sync_rows(sync: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("weight transfers with equal digests", f"{sync['digests_equal']} of {sync['transfers']}")]
    if "median_total_seconds" in sync:
        rows.append(("weight sync, median", f"{sync['median_total_seconds']:.2f} s"))
    if "median_wire_bytes" in sync and "median_plain_bytes" in sync:
        wire, plain = (sync[f"median_{kind}_bytes"] / MIB for kind in ("wire", "plain"))
        rows.append(("bytes sent / before encoding", f"{wire:.2f} / {plain:.2f} MiB"))
    return rows
