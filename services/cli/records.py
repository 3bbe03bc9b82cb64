"""The files of a run directory, read while others write them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
WEIGHT_SYNC_FILE = "weight_sync.jsonl"
SUPERVISOR_FILE = "supervisor.json"
ANSWERS_FILE = re.compile(r"step-(?P<step>\d+)(-(?P<name>.+))?\.jsonl")
"""Of the folder evaluations: one file for a step and a data set."""


@dataclass(slots=True)
class JsonlTail:
    """The rows that were added to a JSON-lines file since the last look."""

    path: Path
    _offset_bytes: int = 0

    def new_rows(self) -> list[Row]:
        """Rows whose lines are complete; a line that is still being written comes with the next look.

        A line that a kill has torn is passed over: whoever wrote it writes the row again.
        """
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset_bytes)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offset_bytes += len(complete) + len(newline)
        return [row for line in complete.splitlines() if (row := _parse(line)) is not None]


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_rows(path: Path) -> list[Row]:
    """Every complete row of a JSON-lines file; none if there is no file."""
    return JsonlTail(path).new_rows()


def last_by(rows: Iterable[Row], *keys: str) -> list[Row]:
    """The last row of each key, sorted by it: a trainer that restarts repeats steps, and the last counts."""
    last = {tuple(row.get(key) for key in keys): row for row in rows}
    return [last[key] for key in sorted(last, key=lambda values: [(value is None, value) for value in values])]


def evaluated_answers(run_dir: Path) -> dict[int, list[Row]]:
    """Graded responses of every evaluation by step, in order; `name` is the data set."""
    answers: dict[int, list[Row]] = {}
    for path in sorted((run_dir / "evaluations").glob("step-*.jsonl")):
        if match := ANSWERS_FILE.fullmatch(path.name):
            rows = [{"name": match["name"], **row} for row in read_rows(path) if row.get("reward") is not None]
            answers.setdefault(int(match["step"]), []).extend(rows)
    return answers


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process of a supervised run."""

    pid: int | None
    """None while it is down."""
    started: bool
    """Whether it has finished its start in this life."""
    restarts: int
    memory_bytes: int
    """When it was last measured."""


@dataclass(frozen=True, slots=True)
class SupervisorRecord:
    """What the last `flotilla up` of a run measured; supervisor.json."""

    started_at: float
    """Unix time in seconds."""
    wall_seconds: float = 0.0
    outcome: str = "running"
    peak_memory_bytes: int = 0
    """Largest sum over all processes of the run (PSS), the supervisor included."""
    processes: dict[str, ProcessRecord] = field(default_factory=dict)

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts of those processes that had any."""
        return {name: one.restarts for name, one in self.processes.items() if one.restarts}

    def write(self, run_dir: Path) -> None:
        """Replace the file at once, so that a reader never sees half of it."""
        path = run_dir / SUPERVISOR_FILE
        draft = path.with_suffix(".json.new")
        draft.write_text(json.dumps(asdict(self) | {"restarts": self.restarts}, indent=1))
        os.replace(draft, path)


def read_supervisor(run_dir: Path) -> SupervisorRecord | None:
    """The record of the last `flotilla up`, if there was one."""
    path = run_dir / SUPERVISOR_FILE
    if not path.is_file():
        return None
    table = json.loads(path.read_text())
    del table["restarts"]
    table["processes"] = {name: ProcessRecord(**one) for name, one in table["processes"].items()}
    return SupervisorRecord(**table)
