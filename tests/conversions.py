"""Small checkpoints for `flotilla convert`, and the command on them."""

from __future__ import annotations

import signal
from pathlib import Path

import torch
from typer.testing import CliRunner, Result

from services.cli.main import app
from tests.checkpoints import random_matrix, save_checkpoint

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {"model_type": "qwen3_moe", "torch_dtype": "bfloat16", "num_hidden_layers": 2}
SHAPES = {
    "model.layers.0.mlp.up_proj.weight": (256, 384),
    "model.layers.0.mlp.gate_proj.weight": (256, 384),
    "model.layers.0.self_attn.o_proj.weight": (200, 256),
    "model.layers.1.mlp.experts.3.down_proj.weight": (384, 128),
}
"""Matrices that become fp8, one with a ragged block."""


def plain_tensors() -> dict[str, torch.Tensor]:
    """What no conversion may change: another dtype, a vector, a scalar, nothing at all."""
    return {
        "model.embed_tokens.weight": random_matrix(300, 128),
        "lm_head.weight": random_matrix(300, 128, 1),
        "model.layers.1.mlp.gate.weight": random_matrix(4, 128, dtype=torch.float32),
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.tensor([0.1, -2.0, 3.5, 1e-30]),
        "model.norm.weight": random_matrix(1, 128)[0],
        "model.step": torch.tensor(7),
        "model.none": torch.empty(0, 3),
    }


def matrices(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {name: random_matrix(*shape, seed, dtype) for seed, (name, shape) in enumerate(SHAPES.items())}


def bf16_checkpoint(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    tensors = [*matrices(dtype).items(), *plain_tensors().items()]
    return save_checkpoint(directory, [dict(tensors[:2]), dict(tensors[2:])], CONFIG)


def many_files(directory: Path, megabytes: int, files: int) -> Path:
    """A checkpoint of some size."""
    rows = megabytes * 1_000_000 // files // 2048
    x = random_matrix(rows // 128 * 128, 1024)
    shards = [{f"model.layers.{i}.mlp.down_proj.weight": x * (i + 1)} for i in range(files)]
    return save_checkpoint(directory, shards, CONFIG)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def to_fp8(source: Path, target: Path, strategy: str = "block", *options: object) -> Result:
    return run("convert", "hf-to-fp8", source, target, "--strategy", strategy, "--max-workers", 2, *options)


def to_bf16(source: Path, target: Path) -> Result:
    return run("convert", "fp8-to-bf16", source, target, "--max-workers", 2)


def refused(done: Result, *words: object) -> None:
    assert done.exit_code == 2, done.output
    for word in words:
        assert str(word) in done.output


def hear_ctrl_c() -> None:
    """In a child: tests that run in the background of a script ignore it, and what they start would too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
