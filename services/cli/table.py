"""How a run looks: a live table on a terminal, one line a step anywhere else."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.cli.records import Row
from services.cli.view import RunView, ServiceLine, duration_text, memory_text

EVENTS_SHOWN = 6
STATE_STYLES = {"ready": "green", "starting": "yellow", "restarting": "red", "problem": "red", "no answer": "dim"}
STEP_FIELDS = (
    ("rollout/mean_reward", "reward", "{:.3f}"),
    ("rollout/kept_groups", "kept", "{:.0f}"),
    ("rollout/dropped_groups", "dropped", "{:.0f}"),
    ("rollout/mean_response_tokens", "tokens/response", "{:.1f}"),
    ("rollout/tokens_per_second", "rollout tok/s", "{:,.0f}"),
    ("train/tokens_per_second", "train tok/s", "{:,.0f}"),
    ("train/log_prob_gap_mean", "log-prob gap", "{:.4f}"),
)
"""Of metrics.jsonl: key, words, format."""


class Display(Protocol):
    """Where `flotilla up` shows what happens."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        ...

    def event(self, text: str) -> None:
        """Something happened."""
        ...

    def update(self, view: RunView, steps: list[Row], evaluations: list[Row]) -> None:
        """A new picture, and the rows that came since the last."""
        ...


class PlainDisplay:
    """One line for each event, step and evaluation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ready: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def event(self, text: str) -> None:
        """Print it with the time of day."""
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False, soft_wrap=True)

    def update(self, view: RunView, steps: list[Row], evaluations: list[Row]) -> None:
        """Print what is new."""
        for line in view.services:
            if line.state == "ready" and line.name not in self._ready:
                self._ready.add(line.name)
                self.event(f"{line.name} is ready")
        for row in steps:
            self.event(step_line(row, view))
        for row in evaluations:
            self.event(evaluation_line(row))


class LiveDisplay:
    """The table, redrawn in place, with the last events under it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._view: RunView | None = None

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def event(self, text: str) -> None:
        """Show it under the table."""
        self._events.append(f"{time.strftime('%H:%M:%S')} {text}")
        self._draw()

    def update(self, view: RunView, steps: list[Row], evaluations: list[Row]) -> None:
        """Redraw."""
        self._view = view
        self._draw()

    def _draw(self) -> None:
        parts = [draw_run(self._view)] if self._view else []
        self._live.update(Group(*parts, Text("\n".join(self._events), style="dim")), refresh=True)


def draw_run(view: RunView) -> RenderableType:
    """The whole picture of a run."""
    return Group(_headline(view), _progress(view), "", _services(view), "", *_numbers(view))


def _headline(view: RunView) -> Text:
    parts = [f"run {view.run_id}", f"step {view.step} of {view.num_rollout}"]
    if view.ledger:
        live = "-" if view.ledger.live_step is None else str(view.ledger.live_step)
        parts += [f"live weights {live}", f"committed {view.ledger.committed_step}", f"epoch {view.ledger.run_epoch}"]
    if view.record:
        parts.append(duration_text(view.record.wall_seconds))
        memory = sum(line.memory_bytes for line in view.services if line.pid)
        parts.append(f"{memory_text(memory)} (peak {memory_text(view.record.peak_memory_bytes)})")
    return Text("  ·  ".join(parts), style="bold")


def _progress(view: RunView) -> RenderableType:
    return ProgressBar(total=view.num_rollout, completed=view.step, width=72, complete_style="green")


def _services(view: RunView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("process", no_wrap=True, min_width=max(len(line.name) for line in view.services))
    table.add_column("state", no_wrap=True, min_width=max(len(_state_text(line)) for line in view.services))
    table.add_column("pid", no_wrap=True, min_width=7, justify="right")
    table.add_column("memory", no_wrap=True, min_width=9, justify="right")
    table.add_column("waits for", no_wrap=True, overflow="ellipsis", ratio=1)
    for line in view.services:
        pid, memory = (str(line.pid), memory_text(line.memory_bytes)) if line.pid else ("-", "-")
        table.add_row(line.name, _state_text(line), pid, memory, Text(line.note))
    return table


def _state_text(line: ServiceLine) -> Text:
    words = f"{line.state} (restarted x{line.restarts})" if line.restarts else line.state
    return Text(words, style=STATE_STYLES[line.state])


def _numbers(view: RunView) -> list[RenderableType]:
    rows: list[tuple[str, str]] = []
    if view.metrics:
        rows.append((f"step {view.metrics['step']:.0f}", "   ".join(step_numbers(view.metrics, view.weight_sync))))
    rows += [("evaluation", evaluation_line(row)) for row in view.evaluations]
    if view.ledger:
        groups = ", ".join(f"{count} {state}" for state, count in view.ledger.groups.items()) or "none"
        law = "" if view.ledger.conserved else "  (they do not add up!)"
        rows.append(("groups", f"{view.ledger.issued} issued: {groups}{law}"))
    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, text in rows:
        grid.add_row(name, Text(text))
    return [grid, ""] if rows else []


def step_numbers(row: Row, weight_sync: Row | None) -> list[str]:
    """The numbers of one step in words; those that the row does not have are left out."""
    numbers = [f"{words} {form.format(row[key])}" for key, words, form in STEP_FIELDS if row.get(key) is not None]
    if weight_sync and weight_sync.get("total_seconds") is not None:
        numbers.append(f"weight sync {weight_sync['total_seconds']:.2f} s")
    return numbers


def step_line(row: Row, view: RunView) -> str:
    """One step as one line."""
    return "  ".join([f"step {row['step']:.0f}/{view.num_rollout}", *step_numbers(row, view.weight_sync)])


def evaluation_line(row: Row) -> str:
    """One evaluation as one line."""
    failed = f", {row['failed']} failed" if row.get("failed") else ""
    return f"{row['name']} after step {row['step']}: mean reward {row['mean_reward']:.3f} of {row['scored']}{failed}"
