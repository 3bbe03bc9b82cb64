"""The weights of the trainer without a model: a list of what it was trained on. Its checkpoint is a JSON file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from flotilla.common.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Trained:
    """What one optimizer step did."""

    digest: str
    """As the buffer has it; it covers policy versions, which differ from run to run."""
    rows: tuple[str, ...]
    """Group, position and SHA-256 of the response's tokens, of every sample in order."""

    @classmethod
    def of(cls, digest: str, samples: Sequence[common_pb2.Sample]) -> Self:
        """Trained on these samples."""
        return cls(digest, tuple(map(_row, samples)))

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


def _row(sample: common_pb2.Sample) -> str:
    content = hashlib.sha256(json.dumps(list(sample.response_token_ids)).encode()).hexdigest()
    return f"{sample.group_id}/{sample.sample_index}/{content}"


@dataclass(slots=True)
class Weights:
    """Every batch that had an effect, in order."""

    batches: list[Trained] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Rollout steps that they contain."""
        return len(self.batches)


def save(run_dir: Path, weights: Weights) -> str:
    """Write a checkpoint, final on disk when this returns; returns its path. Keeps one that is there already."""
    root = run_dir / "checkpoints"
    final, temporary = root / f"step-{weights.step:08d}.json", root / ".unfinished"
    if not final.exists():
        root.mkdir(exist_ok=True)
        with temporary.open("w") as file:
            json.dump([one.to_json() for one in weights.batches], file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(final)
        descriptor = os.open(root, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return str(final)


def load_newest(run_dir: Path) -> tuple[Weights, str]:
    """The newest checkpoint and its path; initial weights and no path if there is none."""
    found = sorted((run_dir / "checkpoints").glob("step-*.json"))
    if not found:
        return Weights(), ""
    table = json.loads(found[-1].read_text())
    return Weights([Trained(one["digest"], tuple(one["rows"])) for one in table]), str(found[-1])
