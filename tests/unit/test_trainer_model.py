"""What the trainer reads from a Hugging Face checkpoint, and how it maps names and shapes. Nothing is faked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.trainer import hf_files, hf_mapping
from services.trainer.hf_mapping import Layout, Rule
from services.trainer.model_config import Experts, LatentAttention, ModelConfig, ModelError, read_config
from services.trainer.rope import Rope, Yarn
from tests.model_configs import RECIPES

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}


def write(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    return path


def test_a_qwen3_config(tmp_path: Path) -> None:
    model = read_config(write(tmp_path))
    assert model == ModelConfig("qwen3", 2, 16, 24, 4, 2, 8, 32, 64, 1e-6, Rope(1000000), True, qk_norm=True)


def test_a_llama_config_in_the_older_spelling(tmp_path: Path) -> None:
    changes = {"rope_parameters": None, "rope_theta": 500000.0, "head_dim": None, "tie_word_embeddings": False}
    model = read_config(write(tmp_path, model_type="llama", **changes))
    assert (model.rope.theta, model.head_size, model.tied_embeddings, model.qk_norm) == (500000, 4, False, False)


def test_the_recipes_configs(tmp_path: Path) -> None:
    models = {}
    for name, config in RECIPES.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        models[name] = read_config(tmp_path)
    r1, glm, qwen = models.values()
    assert r1.latent == LatentAttention(1536, 512, 128, 64, 128)
    assert r1.experts == Experts(256, 8, 2048, 2048, 3, True, groups=8, chosen_groups=4, scale=2.5)
    assert r1.rope == Rope(10000, 1.0, Yarn(40, 4096, 32, 1, 1.0, 1.0))
    assert glm.experts == Experts(160, 8, 1536, 1536, 3, True, scale=2.5)
    assert (glm.rope, glm.qk_norm, glm.qkv_bias, glm.latent) == (Rope(1000000, 0.5), True, True, None)
    assert qwen.experts == Experts(128, 8, 768, 0, 0, False)
    assert [(one.dense_layers, one.mtp_layers) for one in models.values()] == [(3, 1), (3, 1), (0, 0)]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("DeepSeek-R1", {"q_lora_rank": None}, "q_lora_rank"),
        ("DeepSeek-R1", {"scoring_func": "softmax"}, "scoring_func"),
        ("DeepSeek-R1", {"topk_group": 3}, "topk_group = 3"),
        ("DeepSeek-R1", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ("DeepSeek-R1", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers = '1' is not a whole number"),
        ("DeepSeek-R1", {"n_group": 7}, "n_group = 7 must divide the 256 experts"),
        ("DeepSeek-R1", {"n_group": 2}, "topk_group = 4 fit in"),
        ("DeepSeek-R1", {"n_group": 256}, "num_experts_per_tok = 8 are more than the experts of topk_group = 4"),
        ("DeepSeek-R1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("GLM-4.7", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "num_experts_per_tok = 129 are more than the 128 experts"),
        ("Qwen3-30B-A3B", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [1]}, "mlp_only_layers"),
    ],
)
def test_experts_that_cannot_be_trained_are_named(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RECIPES[name], **changes}))
    with pytest.raises(ModelError, match=named):
        read_config(tmp_path)


@pytest.mark.parametrize("name", RECIPES)
def test_a_field_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in RECIPES[name].items() if k != "hidden_size"}))
    with pytest.raises(ModelError, match=r"config\.json: hidden_size is missing"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"model_type": None}, "model_type"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "llama3"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "low_freq_factor": 2.0}},
            "low_freq_factor",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "linear"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": ["qwen3"]}, r"model_type = \['qwen3'\] is not a text"),
        ({"hidden_size": None}, "hidden_size = None is not a whole number from 1 on"),
        ({"hidden_size": 16.0}, "hidden_size = 16.0"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\] is not a table"),
    ],
)
def test_what_cannot_be_trained_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        read_config(write(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_queries_keys_and_values_go_by_group(tmp_path: Path) -> None:
    """4 heads of size 8 in 2 groups: rows of the Megatron tensor are q0 q1 k0 v0, q2 q3 k1 v1."""
    model = read_config(write(tmp_path))
    q = torch.arange(4).repeat_interleave(8)[:, None]
    k, v = 10 + torch.arange(2).repeat_interleave(8)[:, None], 20 + torch.arange(2).repeat_interleave(8)[:, None]
    rule = Rule("qkv", ("q", "k", "v"), Layout.QKV)
    joined = hf_mapping.to_megatron(rule, [q, k, v], model)
    assert joined[::8, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    for ours, original in zip(hf_mapping.to_hf(rule, joined, model), (q, k, v), strict=True):
        assert torch.equal(ours, original)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_go_together_again(size: int, dim: int) -> None:
    full = torch.randn(16, 8)
    for rule in (Rule("plain", ("a",)), Rule("fc1", ("gate", "up"), Layout.GATE_UP)):
        parts = [hf_mapping.shard(rule, full, dim, rank, size) for rank in range(size)]
        assert all(part.numel() == full.numel() // size for part in parts)
        assert torch.equal(hf_mapping.unshard(rule, parts, dim), full)


def test_a_shard_of_gate_and_up_holds_both() -> None:
    full = torch.cat([torch.zeros(4, 2), torch.ones(4, 2)])
    part = hf_mapping.shard(Rule("fc1", ("gate", "up"), Layout.GATE_UP), full, 0, rank=1, size=2)
    assert part[:, 0].tolist() == [0, 0, 1, 1]


def names_of(path: Path) -> set[str]:
    return {name for rule in hf_mapping.rules_of(read_config(path)).values() for name in rule.hf}


def test_names_must_be_those_of_the_model(tmp_path: Path) -> None:
    model, names = read_config(write(tmp_path)), names_of(write(tmp_path))
    spare = {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    hf_mapping.check_names(names | spare, model, tmp_path)
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        hf_mapping.check_names(names - {"model.norm.weight"}, model, tmp_path)
    with pytest.raises(ModelError, match=r"unknown to qwen3.*model\.layers\.7"):
        hf_mapping.check_names(names | {"model.layers.7.mlp.up_proj.weight"}, model, tmp_path)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    model = read_config(write(tmp_path, tie_word_embeddings=False))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        hf_mapping.check_names(names_of(tmp_path) - {"lm_head.weight"}, model, tmp_path)


def test_files_of_tensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        hf_files.find_tensors(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert hf_files.find_tensors(tmp_path) == {"a": tmp_path / "model.safetensors"}
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hf_files.find_tensors(tmp_path)["b"] == tmp_path / "two.safetensors"
    with pytest.raises(ModelError, match=r"two\.safetensors"):
        hf_files.read_tensor(tmp_path / "two.safetensors", "b")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json: weight_map is missing or damaged"):
        hf_files.find_tensors(tmp_path)
