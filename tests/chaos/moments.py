"""Kills of the real trainer at random moments, and what it was at when it died."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from random import Random

import grpc

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from tests.chaos.fleet import Fleet
from tests.chaos.ledger_case import Case
from tests.chaos.stack import Row, read_rows

START_S = 90.0
RECOVERY_S = 90.0
CALL_S = 10.0
MOST_STEPS = 5
"""That a life of the trainer may finish before its last one."""
STEP_S, WRITE_S, LOAD_S = 0.8, 0.12, 12.0
"""About what a rollout step, the writing of a checkpoint, and the start of a trainer take."""
KINDS = {"step": 0.5, "checkpoint": 0.3, "start": 0.2}
"""Share of the kills that come in a step, while a checkpoint is on its way, and while the trainer starts."""
IN_TRAINING, DONE = (
    buffer_pb2.BATCH_STATE_IN_TRAINING,
    (buffer_pb2.BATCH_STATE_TRAINED, buffer_pb2.BATCH_STATE_COMMITTED),
)


@dataclass(frozen=True, slots=True)
class Moment:
    """What was when the trainer died."""

    kind: str
    """Of KINDS."""
    said: str
    """What it was at, by its own word a moment before; empty if it did not answer yet."""
    acknowledged: int
    """Batches that the buffer knew as trained."""
    leased: bool
    """Whether it had a batch that it had not acknowledged."""
    recorded: int
    """Steps in its metrics."""
    final: int
    """Step of the newest complete checkpoint."""
    unfinished: str
    """The checkpoint that it was writing, if any."""


def kill_at_random(fleet: Fleet, random: Random) -> Moment:
    """Wait for a random moment, and kill the trainer."""
    (kind,) = random.choices([*KINDS], [*KINDS.values()])
    if kind == "start":
        fleet.wait(random.uniform(0, LOAD_S))
    elif kind == "checkpoint":
        begun = time.time()
        fleet.until(lambda: _begins_one(fleet.case, begun), RECOVERY_S, "a checkpoint on its way")
        time.sleep(random.uniform(0, WRITE_S))
    else:
        _until_steps(fleet, random.randint(1, MOST_STEPS))
        fleet.wait(random.uniform(0, STEP_S))
    assert not fleet.is_complete, "the run ended before all kills"
    said = _said(fleet.case)
    fleet.kill("trainer")
    return _moment(fleet.case, kind, said)


def as_table(moments: Sequence[Moment]) -> str:
    """As a Markdown table."""
    names = [field.name for field in fields(Moment)]
    rows = [names, ["---"] * len(names), *(astuple(one) for one in moments)]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def _until_steps(fleet: Fleet, count: int) -> None:
    """Wait until so many more steps are recorded."""
    before = len(metrics_of(fleet.case))
    fleet.until(lambda: len(metrics_of(fleet.case)) >= before + count, START_S, f"{count} steps")


def metrics_of(case: Case) -> list[Row]:
    """Recorded steps, repeated ones too, in the order in which they finished."""
    return read_rows(case.spec.run_dir / "metrics.jsonl")


def _unfinished(case: Case) -> list[Path]:
    return list((case.spec.run_dir / "checkpoints").glob(".unfinished-*"))


def _begins_one(case: Case, since_s: float) -> bool:
    """Whether a checkpoint is being written; what an earlier kill left is older."""
    return any(path.stat().st_mtime > since_s for path in _unfinished(case))


def _said(case: Case) -> str:
    try:
        with urllib.request.urlopen(f"http://{case.spec.services.trainer.http}/statusz", timeout=CALL_S) as answer:
            found = json.load(answer)
    except OSError:
        return ""
    waits = [one["what"] for one in found.get("waiting_for", ())]
    return "; ".join(filter(None, (found.get("phase", ""), found.get("doing", ""), *waits)))


def _moment(case: Case, kind: str, said: str) -> Moment:
    with grpc.insecure_channel(case.spec.services.buffer.grpc) as channel:
        request = buffer_pb2.ListBatchesRequest(run_id=case.spec.run_id, page_size=1000)
        batches = buffer_pb2_grpc.BufferServiceStub(channel).ListBatches(request, timeout=CALL_S).batches
    finals = [0, *(int(path.name[5:]) for path in (case.spec.run_dir / "checkpoints").glob("step-*"))]
    return Moment(
        kind,
        said,
        acknowledged=sum(one.state in DONE for one in batches),
        leased=any(one.state == IN_TRAINING for one in batches),
        recorded=max((row["step"] for row in metrics_of(case)), default=0),
        final=max(finals),
        unfinished=", ".join(path.name for path in _unfinished(case)),
    )
