"""Checkpoints of the real Megatron trainer: resumed training is bitwise the uninterrupted one. Nothing is faked.

A save that is killed is a real process that is ended by SIGKILL while it writes.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.errors import FlotillaError
from services.common.run_checkpoints import checkpoint_path, checkpoint_steps
from services.trainer import megatron, saving
from services.trainer.checkpoint import (
    CheckpointError,
    RunState,
    begin_save,
    load,
    remove_old,
    save,
)
from services.trainer.hf_mapping import hf_tensors
from services.trainer.model_config import read_config
from services.trainer.report import train_metrics
from services.trainer.step import Learner
from tests.tiny_models import save_model
from tests.trainer_cases import make_batch, make_samples, make_spec

pytestmark = pytest.mark.stack

DIGEST = "d" * 64
TIMES = {"train/seconds", "train/tokens_per_second"}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    megatron.initialize(seed=1)
    yield
    megatron.destroy()


def make_learner(path: Path, dtype: str = "float32") -> Learner:
    sections: dict[str, Any] = {
        "trainer": {"dtype": dtype},
        "optimizer": {"lr": 3e-3},
        "algorithm": {"num_steps_per_rollout": 2},
    }
    return Learner(make_spec(path, **sections), read_config(path))


def train(learner: Learner, number: int) -> dict[str, float]:
    samples = make_samples(6, seed=number)
    report = learner.train(make_batch(samples, number, [[0, 4], [2], [1, 3], [5]], steps=2), samples)
    metrics = train_metrics([report])
    return {name: value for name, value in metrics.items() if name not in TIMES}


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in hf_tensors(learner.chunks, learner.model)}


def state(step: int, digest: str = DIGEST) -> RunState:
    return RunState(step, digest, tuple(f"batch-{n}" for n in range(step)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_resumed_training_is_bitwise_the_uninterrupted_one(family: str, tmp_path: Path, dtype: str) -> None:
    model = tmp_path / "model"
    save_model(model, family)
    whole = make_learner(model, dtype)
    whole.load_initial_weights()
    for number in range(2):
        train(whole, number)
    path = save(tmp_path / "checkpoints", whole, state(2))
    expected = [train(whole, number) for number in range(2, 5)]

    resumed = make_learner(model, dtype)
    assert load(path, resumed, DIGEST) == state(2)
    assert [train(resumed, number) for number in range(2, 5)] == expected
    final = weights(whole)
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, final[name]), name


def test_a_checkpoint_before_the_first_step(tiny_qwen3: Path, tmp_path: Path) -> None:
    first = make_learner(tiny_qwen3)
    first.load_initial_weights()
    path = save(tmp_path, first, state(0))
    second = make_learner(tiny_qwen3)
    load(path, second, DIGEST)
    assert train(second, 0) == train(first, 0)


def test_saving_a_step_again_keeps_the_first(tiny_qwen3: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_qwen3)
    learner.load_initial_weights()
    path = save(tmp_path, learner, state(1))
    written = (path / "state.json").stat().st_mtime_ns
    assert save(tmp_path, learner, state(1)) == path
    assert (path / "state.json").stat().st_mtime_ns == written


def test_retention_keeps_the_newest(tiny_qwen3: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_qwen3)
    learner.load_initial_weights()
    for step in (1, 2, 3):
        save(tmp_path, learner, state(step))
    remove_old(tmp_path, keep=2)
    assert checkpoint_steps(tmp_path) == [2, 3]


def test_a_checkpoint_of_another_run_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_qwen3)
    learner.load_initial_weights()
    path = save(tmp_path, learner, state(1))
    with pytest.raises(CheckpointError, match="another spec"):
        load(path, learner, "e" * 64)


def damage_flip(path: Path) -> None:
    file = max(path.iterdir(), key=lambda one: one.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_truncate(path: Path) -> None:
    file = max(path.iterdir(), key=lambda one: one.stat().st_size)
    file.write_bytes(file.read_bytes()[:1000])


def damage_missing_file(path: Path) -> None:
    max(path.iterdir(), key=lambda one: one.stat().st_size).unlink()


def damage_state(path: Path) -> None:
    (path / "state.json").write_text('{"format": 1')


def damage_metadata(path: Path) -> None:
    (path / "metadata.json").unlink()


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_missing_file, damage_state, damage_metadata])
def test_a_damaged_checkpoint_is_a_clear_error(tiny_qwen3: Path, tmp_path: Path, damage: Any) -> None:
    learner = make_learner(tiny_qwen3)
    learner.load_initial_weights()
    path = save(tmp_path, learner, state(1))
    damage(path)
    with pytest.raises(CheckpointError, match=str(path)):
        load(path, learner, DIGEST)


def test_training_goes_on_while_a_checkpoint_is_written(tiny_qwen3: Path, tmp_path: Path) -> None:
    """What is written is the state at the beginning; the writer waits until training has gone on."""
    learner = make_learner(tiny_qwen3)
    learner.load_initial_weights()
    train(learner, 0)
    trained = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        write = saving._write
        patch.setattr(saving, "_write", lambda *args: trained.wait(60) and write(*args))
        begun = begin_save(tmp_path, learner, state(1))
        expected = [train(learner, number) for number in (1, 2)]
        assert not begun.written() and checkpoint_steps(tmp_path) == []
        trained.set()
        path = begun.finish()
    resumed = make_learner(tiny_qwen3)
    load(path, resumed, DIGEST)
    assert [train(resumed, number) for number in (1, 2)] == expected


def fail(*_: object) -> None:
    raise OSError("the disk is full")


@pytest.mark.parametrize("instant", ["_prepare", "_write", "_publish"])
def test_a_checkpoint_that_cannot_be_written_is_an_error(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    learner = make_learner(tiny_qwen3)
    learner.load_initial_weights()
    monkeypatch.setattr(saving, instant, fail)
    with pytest.raises(FlotillaError, match="the disk is full"):
        save(tmp_path, learner, state(1))
    assert checkpoint_steps(tmp_path) == []


@pytest.mark.parametrize("instant", ["_write", "_publish", "sync"])
def test_a_killed_save_leaves_the_old_checkpoint(tiny_qwen3: Path, tmp_path: Path, instant: str) -> None:
    """The process dies before anything is written, when all data is, and right before the rename."""
    learner = make_learner(tiny_qwen3)
    learner.load_initial_weights()
    train(learner, 0)
    old = save(tmp_path, learner, state(1))
    script = f"""
        import os, signal
        from pathlib import Path
        from services.trainer import checkpoint, megatron, saving
        from tests.integration.test_trainer_checkpoint import DIGEST, make_learner, state, train
        megatron.initialize(seed=1)
        learner = make_learner(Path({str(tiny_qwen3)!r}))
        checkpoint.load(Path({str(old)!r}), learner, DIGEST)
        train(learner, 1)
        saving.{instant} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.save(Path({str(tmp_path)!r}), learner, state(2))
    """
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=root, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "the killed save has left something"
    assert checkpoint_steps(tmp_path) == [1]

    resumed = make_learner(tiny_qwen3)
    load(old, resumed, DIGEST)
    assert train(resumed, 1) == train(learner, 1)
    save(tmp_path, resumed, state(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoint_path(tmp_path, 2).is_dir()
