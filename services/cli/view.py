"""One picture of a run, from what its processes answer and what its files hold; drawn by `table`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.cli.observe import Answer, Ledger, Observation
from services.cli.processes import Process
from services.cli.records import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    WEIGHT_SYNC_FILE,
    JsonlTail,
    ProcessRecord,
    Row,
    SupervisorRecord,
)
from services.common.spec import RunSpec

GIB = 1 << 30
MIB = 1 << 20
SHORT_WAIT_S = 2.0
"""How long a shorter wait has lasted is not worth a word."""
UNKNOWN_PROCESS = ProcessRecord(pid=None, started=False, restarts=0, memory_bytes=0)


@dataclass(frozen=True, slots=True)
class ServiceLine:
    """One row of the table of processes."""

    name: str
    state: str
    """`ready`, `starting`, `restarting`, `problem` or `no answer`."""
    pid: int | None
    restarts: int
    memory_bytes: int
    note: str
    """What is wrong, else what it has waited for longest, and since when."""


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything that is shown."""

    run_id: str
    num_rollout: int
    services: tuple[ServiceLine, ...]
    ledger: Ledger | None
    metrics: Row | None
    """Last row of metrics.jsonl."""
    weight_sync: Row | None
    """Last row of weight_sync.jsonl."""
    evaluations: tuple[Row, ...]
    """Last row of evaluations.jsonl for each data set."""
    record: SupervisorRecord | None

    @property
    def step(self) -> int:
        """Rollout steps done, as far as is known."""
        trained = int(self.metrics["step"]) if self.metrics else 0
        live = (self.ledger.live_step if self.ledger else None) or 0
        return max(trained, live)

    @property
    def anyone(self) -> bool:
        """Whether any process answers."""
        return any(line.state != "no answer" for line in self.services)


class RunFiles:
    """The rows that a run writes, followed as they come."""

    def __init__(self, run_dir: Path) -> None:
        self._metrics = JsonlTail(run_dir / METRICS_FILE)
        self._evaluations = JsonlTail(run_dir / EVALUATIONS_FILE)
        self._weight_sync = JsonlTail(run_dir / WEIGHT_SYNC_FILE)
        self.last_metrics: Row | None = None
        self.last_weight_sync: Row | None = None
        self.last_evaluations: dict[str, Row] = {}

    def advance(self) -> tuple[list[Row], list[Row]]:
        """Rows of metrics and of evaluations since the last look."""
        steps, evaluations, syncs = self._metrics.new_rows(), self._evaluations.new_rows(), self._weight_sync.new_rows()
        self.last_metrics = next(reversed(steps), self.last_metrics)
        self.last_weight_sync = next(reversed(syncs), self.last_weight_sync)
        self.last_evaluations |= {row["name"]: row for row in evaluations}
        return steps, evaluations


def make_view(
    spec: RunSpec,
    processes: Sequence[Process],
    seen: Observation,
    files: RunFiles,
    record: SupervisorRecord | None,
    now: float | None = None,
) -> RunView:
    """Put a picture together.

    Args:
        spec: The run.
        processes: Its table.
        seen: What the endpoints answered.
        files: What the run has written so far.
        record: Of the supervisor, if one runs.
        now: Unix time in seconds.
    """
    now = time.time() if now is None else now
    known = record.processes if record else {}
    lines = []
    for one in processes:
        process = known.get(one.name, UNKNOWN_PROCESS)
        answer = seen.answers.get(one.name)
        state = service_state(answer, process if record else None)
        note = service_note(answer, now)
        lines.append(ServiceLine(one.name, state, process.pid, process.restarts, process.memory_bytes, note))
    evaluations = tuple(files.last_evaluations[name] for name in sorted(files.last_evaluations))
    return RunView(
        run_id=spec.run_id,
        num_rollout=spec.rollout.num_rollout,
        services=tuple(lines),
        ledger=seen.ledger,
        metrics=files.last_metrics,
        weight_sync=files.last_weight_sync,
        evaluations=evaluations,
        record=record,
    )


def service_state(answer: Answer | None, process: ProcessRecord | None) -> str:
    """One word for how a process is; `process` is what its supervisor knows, if it has one."""
    if answer is None:
        if process is None or process.started:
            return "no answer"
        return "starting" if process.pid else "restarting"
    if answer.starting:
        return "starting"
    if answer.problems:
        return "problem"
    return "ready" if answer.ready else "starting"


def service_note(answer: Answer | None, now: float) -> str:
    """What is wrong with a process, or what it waits for."""
    if answer is None:
        return ""
    if answer.problems:
        return "; ".join(answer.problems)
    if answer.waits:
        what, since = answer.waits[0]
        return f"{what}, for {duration_text(now - since)}" if now - since >= SHORT_WAIT_S else what
    return ""


def duration_text(seconds: float) -> str:
    """A duration as people write it: 4 s, 3:07, 1:02:09."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def memory_text(size_bytes: int) -> str:
    """Bytes as people write them: 310 MiB, 1.66 GiB."""
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"
