"""The model of the demo: a Qwen3 of 0.92 M parameters whose decoder matrices are all multiples of 128."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from demo.tokenizer import END_OF_TURN, PADDING, VOCABULARY, token_id

INITIALIZER_RANGE = 0.05
"""Wider than usual: matrices this small learn faster from it."""
MAX_POSITIONS = 512


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised model in float32; the same for the same seed."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END_OF_TURN),
        pad_token_id=token_id(tokenizer, PADDING),
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).float()
