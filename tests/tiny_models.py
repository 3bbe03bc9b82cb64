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
    """A random `qwen3` or `llama` model in float32 whose matrices are multiples of 128; also saved to `path`.

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
        **overrides,
    }
    kind = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(kind(**settings)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.08 * noise)
    model.save_pretrained(path)
    return model
