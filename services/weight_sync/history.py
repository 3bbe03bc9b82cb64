"""weight_sync.jsonl in the run directory: one row for each session in which every byte arrived."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from services.weight_sync.session import Outcome

FILE_NAME = "weight_sync.jsonl"


def append_outcome(run_dir: Path, outcome: Outcome) -> None:
    """Append a row; `time` is Unix time in seconds, the rest as in Outcome, version split into run_epoch and step."""
    fields = dataclasses.asdict(outcome)
    version = fields.pop("version")
    row = {"time": time.time(), **version, **fields}
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / FILE_NAME).open("a") as file:
        file.write(json.dumps(row) + "\n")
