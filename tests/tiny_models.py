"""Tiny Hugging Face checkpoints for tests: random weights, a byte-level tokenizer, a ChatML-like template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 320
SIGMOID_EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        **SIGMOID_EXPERTS,
        "num_key_value_heads": 4,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "head_dim": 8,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe": {
        **SIGMOID_EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.7,
        "num_nextn_predict_layers": 0,
    },
}
"""What each family has beside the settings of all, or instead of them."""


def save_tokenizer(path: Path) -> Any:
    """A tokenizer of one token a byte, with chat template; also saved to `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AddedToken, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    for tag in ("<think>", "</think>"):
        tokenizer.add_tokens(AddedToken(tag, special=False, normalized=False))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    return tokenizer


def save_model(path: Path, family: str = "qwen3", *, seed: int = 0, tied: bool = True, **overrides: Any) -> Any:
    """A random model in float32; also saved to `path`. Matrices of `qwen3` and `llama` are multiples of 128.

    Weights are large enough for logits to spread, so that greedy outputs of different seeds differ.
    """
    import torch
    import transformers

    tokenizer = save_tokenizer(path)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        **FAMILIES[family],
        **overrides,
    }
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **settings))
    model = model.float().eval()
    generator = torch.Generator().manual_seed(seed)
    router_biases = [(name, one) for name, one in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *router_biases]:
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if "norm" in name else 0.08 * noise)
    model.save_pretrained(path)
    return model


def save_mtp_model(path: Path, family: str, *, seed: int = 0, tied: bool = False, **overrides: Any) -> Any:
    """A random model of three layers, and in its checkpoint, one file, a layer for multi-token prediction.

    As published checkpoints do, it has copies of embedding and output layer. Returns the model without that layer.
    """
    import torch
    from safetensors.torch import load_file, save_file

    hf = save_model(path, family, seed=seed, tied=tied, num_nextn_predict_layers=1, **overrides)
    file = path / "model.safetensors"
    tensors, new = load_file(file), "model.layers.3."
    draw = torch.Generator().manual_seed(seed + 1)
    inner = [(name.replace("layers.2.", "layers.3."), x) for name, x in tensors.items() if "layers.2." in name]
    tensors |= {name: x + 0.02 * torch.randn(x.shape, generator=draw) for name, x in inner}
    norms = ("enorm", "hnorm", "shared_head.norm")
    tensors |= {f"{new}{name}.weight": 1 + 0.1 * torch.randn(128, generator=draw) for name in norms}
    tensors[f"{new}eh_proj.weight"] = 0.08 * torch.randn(128, 256, generator=draw)
    tensors[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{new}shared_head.head.weight"] = hf.lm_head.weight.detach().clone()
    save_file(tensors, file, metadata={"format": "pt"})
    return hf
