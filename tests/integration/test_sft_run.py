"""Runs of supervised fine-tuning as real processes: killed and resumed, over two ranks, evaluated. Nothing is faked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from services.cli.main import app
from services.common.errors import FailedPrecondition
from services.common.kill_points import VARIABLE
from services.common.lock import hold
from services.common.spec import SpecError
from services.common.spec.sft import load_sft
from services.trainer.sft.evaluation import evaluate
from services.trainer.sft.run import LOCK_FILE, SFT_METRICS, check_run_dir, train
from tests.conftest import free_ports
from tests.integration.test_sft_parity import hf_loss
from tests.sft_cases import make_case, write_spec
from tests.trainer_cases import make_spec
from tests.trainer_stage import assert_same, content_of

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 150.0
START_S = 12.0
"""About what a run needs for its start."""
TIMES = {"time", "train/seconds", "train/tokens_per_second", "time/save_seconds"}


def start(spec: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    """The run of a spec, or another command about it."""
    return subprocess.Popen(
        [sys.executable, "-m", *(command or ("services.trainer.sft", "--run")), str(spec)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """What it said, once it has ended with a status."""
    try:
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == code, errors[-3000:]
    return errors


def metrics_of(spec: Path) -> dict[int, dict[str, Any]]:
    """By step, without what time says; a step that was done again was the same again."""
    file = spec.parent / "runs" / "tuned" / "metrics.jsonl"
    found: dict[int, dict[str, Any]] = {}
    for line in file.read_text().splitlines(keepends=True) if file.is_file() else []:
        if line.endswith("\n"):
            row = {name: value for name, value in json.loads(line).items() if name not in TIMES}
            assert found.setdefault(row["step"], row) == row
    return found


def kill_after(spec: Path, steps: int, delay_s: float = 0.0) -> None:
    """Start, and kill so long after so many steps are recorded."""
    process, give_up = start(spec), time.monotonic() + DEADLINE_S
    while len(metrics_of(spec)) < steps and process.poll() is None:
        assert time.monotonic() < give_up, "it did not get so far"
        time.sleep(0.02)
    time.sleep(delay_s)
    process.kill()
    ended(process, -signal.SIGKILL)


def assert_alike(ours: Path, theirs: Path) -> None:
    """The same metrics, models and checkpoints: weights, moments, random states."""
    assert metrics_of(ours) == metrics_of(theirs)
    ours, theirs = (one.parent / "runs" / "tuned" for one in (ours, theirs))
    assert_same(*(load_file(one / "hf" / "model.safetensors") for one in (ours, theirs)))
    assert content_of(ours) == content_of(theirs)


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_killed_run_goes_on_bitwise(tiny_qwen3: Path, tmp_path: Path) -> None:
    whole = write_spec(folder(tmp_path / "whole"), tiny_qwen3, rows=60, sft={"epochs": 1})
    reference = start(whole)
    killed = write_spec(folder(tmp_path / "killed"), tiny_qwen3, rows=60, sft={"epochs": 1})
    kill_after(killed, steps=3)
    ended(reference)
    points = folder(tmp_path / "points")
    (points / "trainer_after_checkpoint").touch()
    ended(start(killed, **{VARIABLE: str(points)}), -signal.SIGKILL)
    kill_after(killed, steps=9)
    ended(start(killed))
    expected = metrics_of(whole)
    assert list(expected) == list(range(1, 13))
    assert expected[1].keys() == {"step", "run_epoch", *SFT_METRICS} - TIMES
    assert_alike(killed, whole)
    assert expected[12]["train/loss"] < expected[1]["train/loss"] - 1
    changed = killed.parent / "rows.jsonl"
    changed.write_text("".join(sorted(changed.read_text().splitlines(keepends=True))))
    assert "batch 0 had other samples; data.path has changed since" in ended(start(killed), 2)


@pytest.mark.nightly
def test_kills_at_random_moments_change_no_bit(tiny_qwen3: Path, tmp_path: Path) -> None:
    """In a step, while a checkpoint is written, while it starts."""
    whole, killed = (write_spec(folder(tmp_path / one), tiny_qwen3, rows=300) for one in ("whole", "killed"))
    reference, random = start(whole), Random(8)
    for _ in range(6):
        more = random.randrange(12)
        kill_after(killed, len(metrics_of(killed)) + more, random.uniform(0, 0.5 if more else START_S))
        print(len(metrics_of(killed)), sorted(path.name for path in killed.parent.glob("runs/tuned/checkpoints/*")))
    ended(reference)
    ended(start(killed))
    assert list(metrics_of(whole)) == list(range(1, 121))
    assert_alike(killed, whole)


def test_one_run_at_a_time_writes_to_a_directory(tiny_qwen3: Path, tmp_path: Path) -> None:
    spec = load_sft(write_spec(tmp_path, tiny_qwen3), environ={})
    spec.run_dir.mkdir(parents=True)
    with hold(spec.run_dir / LOCK_FILE, ""), pytest.raises(FailedPrecondition) as refused:
        train(spec)
    assert f"{spec.run_dir} is in use by process {os.getpid()} on " in str(refused.value)
    assert "give this run a run_dir of its own" in str(refused.value)
    assert [path.name for path in spec.run_dir.iterdir()] == [LOCK_FILE]


def test_the_directory_of_another_run_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    path = write_spec(tmp_path, tiny_qwen3)
    spec = load_sft(path, environ={})
    spec.run_dir.mkdir(parents=True)
    (spec.run_dir / "sft.toml").write_text(spec.to_toml())
    check_run_dir(spec)
    with pytest.raises(SpecError, match=r"other values of optimizer\.lr, sft\.epochs;"):
        check_run_dir(load_sft(path, ["optimizer.lr=0.5", "sft.epochs=9"], environ={}))
    (spec.run_dir / "run.toml").write_text("")
    with pytest.raises(SpecError, match=r"run\.toml is there, of a run of `flotilla up`"):
        check_run_dir(spec)


def test_two_data_parallel_ranks_train_as_one(tiny_qwen3: Path, tmp_path: Path) -> None:
    """The last batch has one sample, so that one of the ranks has none."""
    found = {}
    for world in (1, 2):
        spec = write_spec(folder(tmp_path / str(world)), tiny_qwen3, rows=13)
        port = str(free_ports(1)[0])
        meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = [start(spec, RANK=str(rank), **meeting) for rank in range(world)]
        for rank in ranks:
            ended(rank)
        found[world] = metrics_of(spec)
    assert list(found[1]) == list(found[2]) == list(range(1, 7))
    assert found[2][6]["data/samples"] == 1
    for step, one in found[1].items():
        for name in ("train/loss", "train/grad_norm", "data/learned_tokens", "train/lr"):
            assert found[2][step][name] == pytest.approx(one[name], rel=1e-5), (step, name)


def test_the_loss_of_a_checkpoint_is_that_of_hugging_face_without_an_optimizer(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("services.trainer.step.Optimizer")
    spec, data = make_case(tmp_path, tiny_qwen3)
    with torch.no_grad():
        hf = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
        expected = float(hf_loss(hf, data.samples))
    found = evaluate(spec)
    assert found.loss == pytest.approx(expected, abs=1e-5)
    assert (found.samples, found.tokens) == (18, sum(one.learned for one in data.samples))
    said = CliRunner().invoke(app, ["eval-loss", str(tiny_qwen3), str(spec.data.path), "--json"])
    assert said.exit_code == 0, said.output
    printed = json.loads(said.stdout)
    assert printed["loss"] == pytest.approx(expected, abs=1e-5)
    assert printed["perplexity"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-4)


def test_a_loss_that_is_not_finite_is_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_qwen3, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors")
    spec, _ = make_case(tmp_path, model)
    with pytest.raises(FailedPrecondition, match=f"{model}: the loss is nan; a weight is not finite"):
        evaluate(spec)


def test_the_command_trains_and_evaluates_a_run(tiny_qwen3: Path, tmp_path: Path) -> None:
    """By its directory, a checkpoint, the export, and as if reinforcement learning had made the checkpoint."""
    path = write_spec(tmp_path, tiny_qwen3, sft={"epochs": 1})
    ended(start(path, "services.cli.main", "sft", "--set", "optimizer.lr=1e-2"))
    run_dir, other = load_sft(path, environ={}).run_dir, folder(tmp_path / "other")
    (other / "checkpoints").symlink_to(run_dir / "checkpoints")
    (other / "run.toml").write_text(make_spec(tiny_qwen3).to_toml())
    newest = max((run_dir / "checkpoints").iterdir())

    def loss(model: Path, *options: str) -> float:
        said = CliRunner().invoke(app, ["eval-loss", str(model), str(tmp_path / "rows.jsonl"), "--json", *options])
        return json.loads(said.stdout)["loss"]

    losses = [loss(model) for model in (run_dir, newest, run_dir / "hf", other, tiny_qwen3)]
    assert losses[:4] == pytest.approx([losses[0]] * 4, abs=1e-6)
    assert losses[0] < losses[4]
    overrides = {"rope_parameters": {"rope_theta": 3}}
    (other / "run.toml").write_text(make_spec(tiny_qwen3, model={"overrides": overrides}).to_toml())
    expected = loss(run_dir, "--set", "model.overrides.rope_parameters.rope_theta=3")
    assert loss(other) == pytest.approx(expected, abs=1e-6) and abs(expected - losses[0]) > 1e-3
    said = CliRunner().invoke(app, ["eval-loss", str(run_dir)])
    assert "nats a token, perplexity" in said.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sft", "nowhere.toml"], "nowhere.toml: there is no such run spec"),
        (["sft", "SPEC", "--set", "data.path=nowhere.jsonl"], "data.path: there is no file"),
        (["sft", "SPEC", "--set", "run_dir=bad.jsonl"], "bad.jsonl/sft.lock cannot be written: File exists"),
        (["eval-loss", "MODEL"], "has no data file of its own: give one too"),
        (["eval-loss", "FOLDER", "BAD"], "belongs to no run"),
        (["eval-loss", "MODEL", "nowhere.jsonl"], "there is no file or directory nowhere.jsonl"),
        (["eval-loss", "runs/tunned", "BAD"], "there is no file or directory runs/tunned"),
        (["eval-loss", "MODEL", "BAD"], "bad.jsonl:1: neither 'messages' nor 'prompt' and 'response'"),
        (["sft", "SPEC", "--set", "parallel.tensor=2"], "parallel.tensor = 2: supervised fine-tuning does not cut"),
        (["sft", "SPEC", "--set", "model.load=nowhere"], "model.load: there is no directory"),
        (["sft", "SPEC", "--set", "model.load=MODEL"], "is a Hugging Face checkpoint; `flotilla convert"),
        (["eval-loss", "SPEC"], "checkpoints: there is no complete checkpoint"),
    ],
)
def test_bad_input_is_one_sentence(tiny_qwen3: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    names = {
        "SPEC": write_spec(tmp_path, tiny_qwen3),
        "MODEL": tiny_qwen3,
        "BAD": bad,
        "FOLDER": folder(tmp_path / "empty"),
    }
    said = CliRunner().invoke(app, [str(names.get(one, one)).replace("=MODEL", f"={tiny_qwen3}") for one in arguments])
    assert said.exit_code == 2
    assert words in said.stderr and said.stderr.count("\n") == 1
