"""The run specs that the demo writes: one for its own tiny model, one for a model and data of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.spec import ServicesSpec

USER_PROMPT_TOKENS = 512
USER_RESPONSE_TOKENS = 256
"""What a run with a user's model is given: a model of 100 million parameters then takes minutes a step on two cores."""
ON_CPU = {"dtype": "float32"}
ON_GPU = {"dtype": "bfloat16", "gpu_memory_utilization": 0.4, "kv_cache_gib": 4.0}
"""Leaves the trainer room on the same GPU."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads and where it writes; absolute paths."""

    run_id: str
    run_dir: Path
    model: Path
    prompts: Path
    evaluation: Path | None
    seed: int
    steps: int
    shuffle_rewards: bool
    gpus: tuple[int, ...] = ()
    """CUDA devices: one for everything, or one for trainer and agent and one for the engine; none runs on CPU."""


def arithmetic_spec(inputs: Inputs) -> dict[str, Any]:
    """GRPO on word problems with the warm-started model: minutes on two cores."""
    engine = {"max_model_len": 256, "max_num_seqs": 256}
    return _common(inputs) | {
        "data": {"prompt_data": str(inputs.prompts), "max_prompt_tokens": 128, "seed": inputs.seed},
        "evaluation": _evaluation(inputs, max_response_tokens=64),
        "rollout": _rollout(inputs, rollout_batch_size=32, max_response_tokens=64),
        "optimizer": {"lr": 5e-4, "weight_decay": 0.1, "adam_beta2": 0.98},
        "engine": engine | (ON_GPU if inputs.gpus else ON_CPU | {"kv_cache_gib": 0.5, "num_threads": 1}),
    }


def own_model_spec(inputs: Inputs, max_position_embeddings: int) -> dict[str, Any]:
    """A cautious start for a pretrained model; edit the file that the demo writes and continue from there."""
    max_model_len = min(USER_PROMPT_TOKENS + USER_RESPONSE_TOKENS, max_position_embeddings)
    response_tokens = min(USER_RESPONSE_TOKENS, max_model_len // 2)
    return _common(inputs) | {
        "data": {
            "prompt_data": str(inputs.prompts),
            "max_prompt_tokens": max_model_len - response_tokens,
            "seed": inputs.seed,
        },
        "evaluation": _evaluation(inputs, max_response_tokens=response_tokens),
        "rollout": _rollout(inputs, rollout_batch_size=4, n_samples_per_prompt=4, max_response_tokens=response_tokens),
        "optimizer": {"lr": 1e-6, "weight_decay": 0.1, "adam_beta2": 0.98},
        "engine": {"max_model_len": max_model_len, "max_num_seqs": 64} | (ON_GPU if inputs.gpus else ON_CPU),
        "reward": {"require_think": False},
    }


def _common(inputs: Inputs) -> dict[str, Any]:
    dtype = "bfloat16" if inputs.gpus else "float32"
    return {
        "run_id": inputs.run_id,
        "run_dir": str(inputs.run_dir),
        "model": {"hf_checkpoint": str(inputs.model)},
        "algorithm": {"num_steps_per_rollout": 2, "eps_clip": 0.2, "eps_clip_high": 0.28},
        "trainer": {"dtype": dtype, "save_interval": 5, "seed": inputs.seed},
        "weight_sync": {"quantization": "fp8_block_128"},
        "services": _places(inputs.gpus),
    }


def _places(gpus: tuple[int, ...]) -> dict[str, Any]:
    """Trainer and weight agent on the first GPU, the engine on the last."""
    if not gpus:
        return {}
    trainer, engine = [gpus[0]], [gpus[-1]]
    defaults = ServicesSpec()
    return {
        "trainer": {"gpus": trainer},
        "weight_agents": [one.model_copy(update={"gpus": trainer}).model_dump() for one in defaults.weight_agents],
        "engines": [one.model_copy(update={"gpus": engine}).model_dump() for one in defaults.engines],
    }


def _rollout(inputs: Inputs, **sizes: int) -> dict[str, Any]:
    return {
        "num_rollout": inputs.steps,
        "n_samples_per_prompt": 8,
        "temperature": 1.0,
        "seed": inputs.seed,
        "shuffle_rewards": inputs.shuffle_rewards,
        **sizes,
    }


def _evaluation(inputs: Inputs, max_response_tokens: int) -> dict[str, Any]:
    if inputs.evaluation is None:
        return {}
    return {
        "interval": 10,
        "temperature": 0.0,
        "max_response_tokens": max_response_tokens,
        "sets": {"held-out": {"prompt_data": str(inputs.evaluation)}},
    }
