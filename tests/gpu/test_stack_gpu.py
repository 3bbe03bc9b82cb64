"""The demo's task on GPUs, all services real: bfloat16 trainer, fp8 engine, every version evaluated and checkpointed.

With two GPUs trainer and agent have one and the engine the other (NCCL); with one they share it (CUDA IPC). The
starting model is the demo's warm start: `FLOTILLA_DEMO_MODEL` names one that is there already.
"""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch

from demo.data import write_prompts
from demo.problems import Split
from demo.spec import Inputs, arithmetic_spec
from flotilla.common.v1 import common_pb2
from services.common.run_checkpoints import checkpoint_path, checkpoint_steps
from services.common.spec import RunSpec
from tests.conftest import free_ports
from tests.gpu.fresh_engine import (
    Tokens,
    demo_model,
    greedy_answers,
    start_greedy,
    write_bf16_checkpoint,
    write_fp8_checkpoint,
)
from tests.stack import Ended, evaluation_samples, ledger_of, run_to_the_end

GPUS = tuple(range(min(2, torch.cuda.device_count())))
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500), pytest.mark.skipif(not GPUS, reason="needs CUDA")]

STEPS = 12
TRAINING_ROWS, HELD_OUT_ROWS = 1024, 64
RISE = 0.1
ENGINES_AT_ONCE = 7
TIE_RESPONSES = 0.05
"""Share of responses that may differ: two logits that bfloat16 cannot tell apart fall either way with the batch."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A run that has ended, with the greedy samples of every version."""

    run: Ended
    samples: dict[int, list[common_pb2.Sample]]


def demo_spec(folder: Path) -> RunSpec:
    """The demo's run, with every version evaluated and kept, on ports of its own."""
    model = demo_model(folder)
    train, held_out = folder / "train.jsonl", folder / "held-out.jsonl"
    write_prompts(train, Split.TRAINING, TRAINING_ROWS, seed=0)
    write_prompts(held_out, Split.HELD_OUT, HELD_OUT_ROWS, seed=0)
    table = arithmetic_spec(Inputs("gpu", folder / "run", model, train, held_out, 0, STEPS, False, GPUS))
    table["evaluation"]["interval"] = 1
    table["trainer"] |= {"save_interval": 1, "keep_checkpoints": STEPS + 1}
    ports = iter(free_ports(15))
    table["redis"] = {"port": next(ports)}
    at = table["services"]
    for name in ("buffer", "reward", "rollout_gateway", "trainer", "weight_sync"):
        at[name] = at.get(name, {}) | {"grpc_port": next(ports), "http_port": next(ports)}
    for endpoint in (*at["weight_agents"], *at["engines"]):
        endpoint |= {"grpc_port": next(ports), "http_port": next(ports)}
    spec = RunSpec.model_validate(table)
    (folder / "run.toml").write_text(spec.to_toml())
    return spec


async def evaluated(spec: RunSpec) -> Evaluated:
    run = await run_to_the_end(spec)
    async with ledger_of(spec) as stub:
        return Evaluated(run, await evaluation_samples(spec, stub))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return asyncio.run(evaluated(demo_spec(tmp_path_factory.mktemp("demo"))))


def test_the_reward_rises(demo: Evaluated):
    rewards = [row["rollout/mean_reward"] for row in demo.run.metrics]
    print("mean reward by step:", [round(one, 3) for one in rewards])
    assert len(rewards) == STEPS
    assert fmean(rewards[-3:]) >= fmean(rewards[:3]) + RISE


def test_every_version_arrives_whole(demo: Evaluated):
    rows = demo.run.weight_sync
    assert {row["step"] for row in rows} == set(range(STEPS + 1))
    assert all(row["equal"] and row["receiver_digests"] == [row["sender_digest"]] for row in rows)
    assert len({row["sender_digest"] for row in rows}) == STEPS + 1
    assert all(row["wire_bytes"] < row["plain_bytes"] for row in rows)
    print("total seconds by update:", [round(row["total_seconds"], 3) for row in rows])


def test_the_log_prob_gap_is_reported(demo: Evaluated):
    gaps = [row["train/log_prob_gap_mean"] for row in demo.run.metrics]
    print("mean log-prob gap by step:", [round(one, 5) for one in gaps])
    assert all(0 < one < 0.1 for one in gaps)


def test_greedy_output_after_every_update_is_that_of_a_fresh_engine(demo: Evaluated, tmp_path: Path):
    spec = demo.run.spec
    export_checkpoints(spec, tmp_path)
    checkpoints = {step: tmp_path / f"fp8-{step}" for step in range(STEPS + 1)}
    for step, path in checkpoints.items():
        plain = tmp_path / f"bf16-{step}"
        write_bf16_checkpoint(spec.model.hf_checkpoint if step == 0 else tmp_path / str(step), plain)
        write_fp8_checkpoint(plain, path)
    answers = fresh_answers(demo, checkpoints)
    for step, expected in answers.items():
        found = [list(one.response_token_ids) for one in demo.samples[step]]
        different = sum(a != b for a, b in zip(found, expected, strict=True))
        print(f"version {step}: {different} of {len(found)} greedy responses differ")
        assert different <= TIE_RESPONSES * len(found)
    assert answers[0] != answers[STEPS], "the weights have not moved enough to tell"


def fresh_answers(demo: Evaluated, checkpoints: dict[int, Path]) -> dict[int, Tokens]:
    """Of an engine of its own for each checkpoint, a few at a time."""
    most, found, running = demo.run.spec.evaluation.max_response_tokens, {}, dict[int, subprocess.Popen[bytes]]()
    prompts = [list(one.prompt_token_ids) for one in demo.samples[0]]
    for step, path in checkpoints.items():
        if len(running) == ENGINES_AT_ONCE:
            oldest = next(iter(running))
            found[oldest] = greedy_answers(checkpoints[oldest], running.pop(oldest))
        running[step] = start_greedy(path, prompts, most, GPUS[step % len(GPUS)])
    return found | {step: greedy_answers(checkpoints[step], process) for step, process in running.items()}


def export_checkpoints(spec: RunSpec, folder: Path) -> None:
    """Every checkpoint of a run as `folder/STEP`, a Hugging Face checkpoint."""
    from services.trainer import checkpoint, megatron
    from services.trainer.export import export_hf
    from services.trainer.model_config import read_config
    from services.trainer.step import Learner

    root = spec.run_dir / "checkpoints"
    megatron.initialize(seed=0)
    try:
        learner = Learner(spec, read_config(spec.model.hf_checkpoint))
        for step in checkpoint_steps(root):
            checkpoint.load(checkpoint_path(root, step), learner, spec.digest())
            export_hf(learner, spec.model.hf_checkpoint, folder / str(step))
    finally:
        megatron.destroy()
