"""The demo's command: specs, checks of a user's files, judgement. The `flotilla` command itself is not started."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import tomli_w

from demo import __main__ as demo
from demo.__main__ import gpus, parse_arguments, prepare
from demo.checks import check_model
from demo.outcome import judge, judge_control, judge_quick, read_gain, read_rewards
from demo.spec import Inputs, arithmetic_spec, own_model_spec
from demo.warm_start import Recipe, WarmStartReport
from services.common.prompts import check_rows
from services.common.spec import RunSpec, SpecError, load_run

ROW = json.dumps({"prompt": "1+1?", "label": 2})


def inputs(tmp_path: Path, **changes: object) -> Inputs:
    values = {
        "run_id": "demo",
        "run_dir": tmp_path / "run",
        "model": tmp_path / "model",
        "prompts": tmp_path / "train.jsonl",
        "evaluation": tmp_path / "held-out.jsonl",
        "seed": 5,
        "steps": 40,
        "shuffle_rewards": False,
    }
    return Inputs(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def resolved(tmp_path: Path, table: dict):
    (tmp_path / "demo.toml").write_text(tomli_w.dumps(table))
    return load_run(tmp_path / "demo.toml", environ={})


def test_the_spec_of_the_demo_is_the_recipe(tmp_path: Path) -> None:
    spec = resolved(tmp_path, arithmetic_spec(inputs(tmp_path)))
    assert spec.run_dir == tmp_path / "run"
    assert (spec.rollout.num_rollout, spec.rollout.rollout_batch_size, spec.rollout.n_samples_per_prompt) == (40, 32, 8)
    assert (spec.optimizer.lr, spec.optimizer.weight_decay, spec.optimizer.adam_beta2) == (5e-4, 0.1, 0.98)
    assert (spec.algorithm.num_steps_per_rollout, spec.algorithm.eps_clip, spec.algorithm.eps_clip_high) == (
        2,
        0.2,
        0.28,
    )
    assert (spec.trainer.dtype, spec.engine.dtype, spec.trainer.save_interval) == ("float32", "float32", 5)
    assert (spec.engine.max_model_len, spec.engine.max_num_seqs) == (256, 256)
    assert (spec.rollout.max_response_tokens, spec.rollout.temperature) == (64, 1.0)
    assert spec.weight_sync.quantization == "fp8_block_128"
    assert list(spec.evaluation.sets) == ["held-out"]
    assert (spec.evaluation.interval, spec.evaluation.temperature) == (10, 0.0)
    assert not spec.rollout.shuffle_rewards


def test_rewards_can_be_shuffled_as_a_control(tmp_path: Path) -> None:
    assert resolved(tmp_path, arithmetic_spec(inputs(tmp_path, shuffle_rewards=True))).rollout.shuffle_rewards


@pytest.mark.parametrize("context", [512, 131072])
def test_a_users_model_gets_no_more_context_than_it_has(tmp_path: Path, context: int) -> None:
    spec = resolved(tmp_path, own_model_spec(inputs(tmp_path, evaluation=None), context))
    assert spec.engine.max_model_len <= context
    assert spec.evaluation.sets == {}


def test_an_incomplete_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such directory"):
        check_model(tmp_path / "nowhere")
    with pytest.raises(SpecError, match=r"config\.json"):
        check_model(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    with pytest.raises(SpecError, match="safetensors"):
        check_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert check_model(tmp_path) == 512


def test_the_command_refuses_bad_input_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo", "--model", "nowhere", "--data", "nothing.jsonl"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": f"{root}:{root}/protos/gen"}, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.decode().count("\n") == 1
    assert "nowhere" in done.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_preparing_writes_data_and_spec_and_reuses_a_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo", "--run-id", "again", "--steps", "3", "--seed", "7"])
    model = tmp_path / "runs" / "again" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    report = WarmStartReport(accuracy=0.3, final_loss=0.1, parameters=1, wall_s=1.0, cpu_s=1.0)
    (model / "warm_start.json").write_text(json.dumps({"recipe": asdict(Recipe(seed=7)), "report": asdict(report)}))
    spec_file = prepare(parse_arguments())
    spec = load_run(spec_file, environ={})
    spec.check_files()
    assert spec.run_dir == spec_file.parent == tmp_path / "runs" / "again"
    assert spec.rollout.num_rollout == 3
    assert check_rows("", spec.data.prompt_data, spec.data) == 4096
    assert check_rows("", spec.evaluation.sets["held-out"].prompt_data, spec.data) == 256


@pytest.mark.parametrize("arguments", [["--run-id", "../x"], ["--model", "m"], ["--eval-data", "e"], ["--steps", "x"]])
def test_arguments_that_do_not_fit_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit) as refused:
        parse_arguments()
    assert refused.value.code == 2


def test_the_demo_passes_once_five_steps_reach_the_target_and_held_out_problems_gain() -> None:
    assert judge([0.4] * 20 + [0.8] * 5 + [0.7] * 5, 0.3).passed
    assert not judge([0.4] * 20 + [0.8] * 5 + [0.7] * 5, 0.2).passed
    assert not judge([0.4] * 20 + [0.85] * 4, 0.3).passed
    assert not judge([], 0.3).passed


def test_the_quick_demo_passes_on_a_rise() -> None:
    assert judge_quick([0.4] * 5 + [0.51] * 5).passed
    assert not judge_quick([0.4] * 5 + [0.45] * 5).passed
    assert not judge_quick([0.4] * 3).passed
    assert not judge_quick([]).passed


def test_the_control_passes_without_a_gain(tmp_path: Path) -> None:
    rows = [{"step": step, "mean_reward": reward} for step, reward in ((0, 0.3), (10, 0.5), (20, 0.33))]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert judge_control(read_gain(tmp_path)).passed
    assert not judge_control(0.06).passed


def test_a_repeated_step_counts_once(tmp_path: Path) -> None:
    rows = [{"step": 1, "rollout/mean_reward": 0.1}, {"step": 2, "rollout/mean_reward": 0.2}]
    rows += [{"step": 2, "rollout/mean_reward": 0.3}, {"step": 3, "rollout/mean_reward": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rewards(tmp_path) == [0.1, 0.3]


@pytest.mark.parametrize("text", ["", "a", "0,1,2", "-1", "0;1"])
def test_gpus_that_are_no_devices(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give one device"):
        gpus(text)


def test_gpus_that_are_not_there_are_refused_before_the_warm_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "count_gpus", lambda: 0)
    monkeypatch.setattr(demo, "warm_up", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(sys, "argv", ["demo", "--gpus", "0"])
    with pytest.raises(SpecError, match=r"services\.trainer\.gpus: there is no GPU 0; this machine has none"):
        prepare(parse_arguments())
    assert not list(tmp_path.iterdir())


def test_gpus_place_trainer_and_engine(tmp_path):
    spec = RunSpec.model_validate(arithmetic_spec(inputs(tmp_path, gpus=gpus("0,1"))))
    at = spec.services
    assert (at.trainer.gpus, at.weight_agents[0].gpus, at.engines[0].gpus) == ([0], [0], [1])
    assert (spec.trainer.dtype, spec.engine.dtype) == ("bfloat16", "bfloat16")
