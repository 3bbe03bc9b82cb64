"""`flotilla grade`: grade a file of responses, to check a grader on data of one's own before a run."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from services.cli.run_argument import refuse
from services.common.spec import RewardSpec, SpecError, explain

if TYPE_CHECKING:
    from services.reward.files import GradedRow

SLOW_FRACTION = 0.99


@dataclass(slots=True)
class Summary:
    """What is counted over the rows."""

    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    judged: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    """Rows with `expected`, by (expected right, value agrees)."""
    unscored: int = 0
    """Of these, rows whose verdict is no score."""
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of the rows that took a worker's time."""

    def add(self, row: GradedRow) -> None:
        """Count a row."""
        self.verdicts[row.graded.verdict.name, row.graded.reason.name] += 1
        if row.graded.seconds:
            self.seconds.append(row.graded.seconds)
        self.values.append(row.value)
        if row.right is not None:
            self.judged[bool(row.content["expected"]), row.right] += 1
            self.unscored += row.graded.verdict.name != "SCORED"


def grade(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="Rows with response and label.")],
    grader: Annotated[
        str, typer.Option("--grader", help="As reward.grader in a run spec; a row's metadata.rm_type goes before it.")
    ],
    output: Annotated[Path | None, typer.Option("--output", help="Write the rows with their verdicts here.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes.")] = (os.cpu_count() or 1) + 1,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.01, help="Deadline of a row, in s: 1, of your own grader 10."),
    ] = None,
    remote_url: Annotated[str, typer.Option("--remote-url", help="Where the grader `remote` asks.")] = "",
    per_group: Annotated[
        bool, typer.Option("--per-group", help="The function takes all rows of a group_id, side by side in the file.")
    ] = False,
    require_think: Annotated[
        bool, typer.Option("--require-think/--no-require-think", help="No reward without a closed <think>.")
    ] = True,
) -> None:
    """Grade {response, label} rows; where they have `expected` (0 or 1), say how often the grader is right."""
    try:
        from services.reward.files import BadRow, grade_file, read_rows  # here, because only this command needs sympy
    except ModuleNotFoundError as error:
        refuse(f"flotilla grade needs {error.name}; install it with `pip install {error.name}`")
    own = {} if timeout is None else {"timeout_s": timeout, "custom_timeout_s": timeout}
    spec = _reward_spec(
        grader=grader,
        workers=workers,
        custom_workers=workers,
        remote_url=remote_url,
        custom_per_group=per_group,
        require_think=require_think,
        **own,
    )
    summary, began = Summary(), time.monotonic()
    try:
        rows = sum(1 for _ in read_rows(file, spec))
        with Progress(
            console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal
        ) as bar:
            count = _counter(summary, bar, rows)
            grade_file(read_rows(file, spec), spec, output, count)
    except (BadRow, OSError, SpecError) as error:
        refuse(error)
    _show(summary, time.monotonic() - began)


def _reward_spec(**fields: object) -> RewardSpec:
    """What a run spec would say. Exits if it cannot be used."""
    try:
        return RewardSpec.model_validate(fields)
    except ValidationError as error:
        refuse(explain("reward", error))


def _counter(summary: Summary, bar: Progress, rows: int) -> Callable[[GradedRow], None]:
    task = bar.add_task("grading", total=rows)

    def count(row: GradedRow) -> None:
        summary.add(row)
        bar.advance(task)

    return count


def _show(summary: Summary, wall_s: float) -> None:
    console, rows = Console(), summary.verdicts.total()
    table = Table("verdict", "reason", "rows", "share")
    for (verdict, reason), count in summary.verdicts.most_common():
        table.add_row(verdict, reason, str(count), f"{count / rows:.1%}")
    console.print(table)
    if judged := summary.judged.total():
        right = summary.judged[True, True] + summary.judged[False, True]
        typer.echo(
            f"accuracy {right / judged:.2%} of {judged} rows with `expected`: "
            f"{summary.judged[False, False]} false positives, {summary.judged[True, False]} false negatives, "
            f"{summary.unscored} without a score"
        )
    if rows:
        typer.echo(f"mean value {statistics.fmean(summary.values):.4g}")
    typer.echo(f"{rows} rows in {wall_s:.1f} s, the start of the workers included; {_times(summary.seconds)}")


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "none took a worker's time"
    ordered = sorted(seconds)
    late = ordered[int(SLOW_FRACTION * (len(ordered) - 1))]
    median = statistics.median(ordered)
    return f"{len(ordered)} took a worker's: median {median:.3f}, p99 {late:.3f}, most {ordered[-1]:.3f} s"
