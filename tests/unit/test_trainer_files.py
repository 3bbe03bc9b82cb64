"""Checkpoint directories, metrics.jsonl and the layout of shared memory, without a model. Nothing is faked."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from services.common.spec import OptimizerSpec
from services.trainer.checkpoint import CheckpointError, read_state, remove_old
from services.trainer.export import ALIGNMENT_BYTES, plan_slices
from services.trainer.metrics import STEP_METRICS, MetricsWriter, drop_torn_line
from services.trainer.optimizer import learning_rate


def test_old_checkpoints_are_removed(tmp_path: Path) -> None:
    for name in ("step-00000010", "step-00000002", ".unfinished-step-00000012", "notes"):
        (tmp_path / name).mkdir()
    remove_old(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".unfinished-step-00000012", "notes", "step-00000010"]


@pytest.mark.parametrize("content", [None, "", "[]", '{"format": 1}', '{"format": 99}'])
def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_state(tmp_path)


def test_slices_lie_one_after_another() -> None:
    tensors = {
        "a": torch.zeros(3, 5),
        "b": torch.zeros(7, dtype=torch.bfloat16),
        "c": torch.zeros(2, 3, 4),
    }
    slices, size = plan_slices(tensors.items())
    assert [one.offset_bytes for one in slices] == [0, 64, 128]
    assert size == 128 + 128
    assert all(one.offset_bytes % ALIGNMENT_BYTES == 0 for one in slices)
    assert [one.dtype for one in slices] == ["float32", "bfloat16", "float32"]
    assert [one.strides for one in slices] == [(5, 1), (1,), (12, 4, 1)]


def test_learning_rate_warms_up_and_stays() -> None:
    spec = OptimizerSpec(lr=8.0, warmup_steps=4)
    assert [learning_rate(spec, step) for step in (0, 1, 3, 4, 100)] == [2.0, 4.0, 8.0, 8.0, 8.0]
    assert learning_rate(OptimizerSpec(lr=8.0), 0) == 8.0


def test_learning_rate_falls_along_half_a_cosine() -> None:
    spec = OptimizerSpec(lr=8.0, warmup_steps=2, lr_decay="cosine", lr_decay_steps=10, min_lr=2.0)
    assert [learning_rate(spec, step) for step in (0, 1, 2)] == [4.0, 8.0, 8.0]
    assert learning_rate(spec, 6) == pytest.approx(5.0)
    assert learning_rate(spec, 9) == pytest.approx(2 + 3 * (1 + math.cos(math.pi * 7 / 8)))
    assert [learning_rate(spec, step) for step in (10, 100)] == [2.0, 2.0]


def test_metrics_go_on_after_a_torn_line(tmp_path: Path) -> None:
    values = dict.fromkeys(STEP_METRICS, 0.5)
    first = MetricsWriter(tmp_path)
    first.write(1, 1, values)
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "run')
    second = MetricsWriter(tmp_path)
    second.write(2, 2, {**values, "train/loss": math.nan})
    second.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["run_epoch"], row["train/loss"]) for row in rows] == [(1, 1, 0.5), (2, 2, None)]
    assert rows[0].keys() == {"step", "run_epoch", "time", *STEP_METRICS}
    assert any((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize(("content", "left"), [("", ""), ("a\nb\n", "a\nb\n"), ("a\nb", "a\n"), ("ab", "")])
def test_a_torn_line_is_dropped(tmp_path: Path, content: str, left: str) -> None:
    path = tmp_path / "rows"
    path.write_text(content)
    drop_torn_line(path)
    assert path.read_text() == left
