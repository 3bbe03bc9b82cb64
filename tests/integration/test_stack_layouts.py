"""Runs whose trainer is cut over two ranks, under `flotilla up`: real Redis, vLLM and Megatron-core, nothing faked.

Digests show that the engine gets the weights of all ranks, and log-probs of every batch that it computes the same with
them. These are not compared for `deepseek_v3`: there vLLM on the CPU is half a nat from Hugging Face's model, also with
weights that it has loaded by itself.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.stack import FP32_GAP_NATS, run_to_the_end, write_run
from tests.tiny_models import save_model, save_mtp_model

pytestmark = [pytest.mark.stack, pytest.mark.nightly, pytest.mark.timeout(900)]

STEPS = 3
PROMPTS = [{"prompt": f"{a} times {b} is", "label": str(a * b)} for a in range(4) for b in range(4)]
GRADER = """
def letters(item):
    return sum(map(ord, item.response)) % 7 / 7
"""
"""Differs from response to response, so that there are gradients."""
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
"""Sizes of latent attention that vLLM computes on a CPU, those of DeepSeek-V3."""


@pytest.mark.parametrize(
    ("family", "layout", "sizes"),
    [
        pytest.param("qwen3", {"context": 2}, {}, id="context"),
        pytest.param("qwen3", {"pipeline": 2}, {}, id="pipeline"),
        pytest.param("deepseek_v3", {"expert": 2}, LATENT, id="expert"),
        pytest.param("llama", {"tensor": 2}, {}, id="llama"),
        pytest.param("qwen2", {}, {}, id="qwen2"),
        pytest.param("qwen3_moe", {"expert": 2}, {}, id="qwen3_moe"),
        pytest.param("glm4_moe", {"tensor": 2}, {}, id="glm4_moe"),
    ],
)
def test_engine_and_ranks_hold_the_same_weights(
    tmp_path: Path, family: str, layout: dict[str, int], sizes: dict[str, int]
) -> None:
    mtp = family in ("deepseek_v3", "glm4_moe")
    save = save_mtp_model if mtp else save_model
    save(tmp_path / "model", family, tied=False, seed=7, **sizes)
    spec = write_run(
        tmp_path / "run",
        tmp_path / "model",
        PROMPTS,
        ranks=2,
        parallel=layout,
        rollout={"num_rollout": STEPS},
        reward={"grader": "my_rewards:letters"},
        optimizer={"lr": 1e-3},
        trainer={"save_interval": 2, "num_threads": 1, "mtp_loss_scaling_factor": 0.3 * mtp},
    )
    (spec.run_dir.parent / "my_rewards.py").write_text(GRADER)
    run = asyncio.run(run_to_the_end(spec))
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    if family != "deepseek_v3":
        assert max(row["train/log_prob_gap_max"] for row in run.metrics) <= FP32_GAP_NATS
    assert all(row["train/grad_norm"] > 0 for row in run.metrics)
    assert all((row["train/mtp_grad_norm"] > 0) == mtp for row in run.metrics)
    sent = run.weight_sync
    assert [(row["run_epoch"], row["step"]) for row in sent] == [(1, step) for step in range(STEPS + 1)]
    assert all(row["equal"] and row["receiver_digests"] == [row["sender_digest"]] for row in sent)
    assert len({row["sender_digest"] for row in sent}) == STEPS + 1
    assert (run.left_running, run.left_in_shared_memory) == ([], [])
