"""FLOPs of a sample, against a count by hand and against what torch counts in the model of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from services.trainer.flops import SampleFlops, forward_flops
from services.trainer.model_config import ModelConfig, read_config
from tests.tiny_models import save_model

LAYERS, HIDDEN, FFN, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, VOCABULARY = 2, 16, 24, 4, 2, 8, 32
MODEL = ModelConfig(
    "qwen3", LAYERS, HIDDEN, FFN, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, VOCABULARY, 64, 1e-6, 1000000, True
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


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False)])
def test_what_torch_counts(family: str, tied: bool, tmp_path: Path) -> None:
    """Without a fused kernel attention also computes the pairs that its mask takes out."""
    module, tokens = save_model(tmp_path, family, tied=tied), 64
    module.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        module(torch.zeros(1, tokens, dtype=torch.long))
    config = read_config(tmp_path)
    masked = config.layers * 4 * config.heads * config.head_size * tokens * (tokens - 1) / 2
    assert total(forward_flops(config), tokens) + masked == counted.get_total_flops()
