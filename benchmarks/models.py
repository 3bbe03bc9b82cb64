"""Shapes of published models, as their config.json says; the benchmarks fill them with random weights."""

from __future__ import annotations

from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "attention_bias": False,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
QWEN3: dict[str, dict[str, Any]] = {
    "0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def qwen3_linears(size: str) -> list[tuple[int, int]]:
    """Shapes of the matrices of all decoder layers, rows first."""
    config = QWEN3[size]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    attention = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    return [*attention, (inner, hidden), (inner, hidden), (hidden, inner)] * config["num_hidden_layers"]
