"""FLOPs of a sample, against a count by hand and against what torch counts in the model of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from services.trainer.flops import SampleFlops, forward_flops
from services.trainer.model_config import ModelConfig, read_config
from services.trainer.rope import Rope
from tests.model_configs import RECIPES
from tests.tiny_models import FAMILIES, save_model

LAYERS, HIDDEN, FFN, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, VOCABULARY = 2, 16, 24, 4, 2, 8, 32
MODEL = ModelConfig(
    "qwen3", LAYERS, HIDDEN, FFN, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, VOCABULARY, 64, 1e-6, Rope(1000000), True
)


def total(flops: SampleFlops, tokens: int) -> float:
    return flops.per_token * tokens + flops.per_token_squared * tokens**2


def count(tokens: int) -> int:
    """Multiplications and additions, matrix by matrix and token by token."""
    query, key_value = HEADS * HEAD_SIZE, KEY_VALUE_HEADS * HEAD_SIZE
    matrices = [(HIDDEN, query), (HIDDEN, key_value), (HIDDEN, key_value), (query, HIDDEN)]
    matrices += [(HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN)]
    layer = tokens * sum(2 * rows * columns for rows, columns in matrices)
    for token in range(tokens):
        seen = token + 1
        layer += HEADS * seen * 2 * HEAD_SIZE  # scores
        layer += HEADS * seen * 2 * HEAD_SIZE  # sums of values
    return LAYERS * layer + tokens * 2 * HIDDEN * VOCABULARY


@pytest.mark.parametrize("tokens", [1, 2, 7, 500])
def test_a_count_by_hand(tokens: int) -> None:
    assert total(forward_flops(MODEL), tokens) == count(tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_torch_counts(family: str, tmp_path: Path) -> None:
    """Without a fused kernel attention also computes the pairs that its mask takes out."""
    module, tokens = save_model(tmp_path, family), 64
    module.set_attn_implementation("eager")
    module.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        module(torch.zeros(1, tokens, dtype=torch.long))
    config = read_config(tmp_path)
    pair = (
        2
        * config.heads
        * (config.latent.query_size + config.latent.value_size if config.latent else 2 * config.head_size)
    )
    masked = config.layers * pair * tokens * (tokens - 1) / 2
    assert total(forward_flops(config), tokens) + masked == counted.get_total_flops()


@pytest.mark.parametrize(("model", "billions"), [("DeepSeek-R1", 37), ("GLM-4.7", 32), ("Qwen3-30B-A3B", 3.3)])
def test_a_token_goes_through_as_many_parameters_as_the_model_card_says(
    model: str, billions: float, tmp_path: Path
) -> None:
    """Model cards count the embedding too, of which a token takes one row."""
    (tmp_path / "config.json").write_text(json.dumps(RECIPES[model]))
    config = read_config(tmp_path)
    seen = forward_flops(config).per_token / 2 + config.vocabulary * config.hidden
    assert seen / 1e9 == pytest.approx(billions, rel=0.06)
