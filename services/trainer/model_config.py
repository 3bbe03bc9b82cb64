"""What defines a model, read from the `config.json` of a Hugging Face checkpoint; what is not supported is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from services.common.errors import FailedPrecondition
from services.common.model_overrides import config_of
from services.trainer.config_reading import Fields, Reading, only
from services.trainer.rope import Rope, read_rope


class ModelError(FailedPrecondition):
    """The checkpoint's model cannot be trained here; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (arXiv 2405.04434): ranks of the compressed vectors, sizes of a head."""

    query_rank: int
    key_value_rank: int
    plain_size: int
    """Of a query and key without position."""
    rotary_size: int
    value_size: int

    @property
    def query_size(self) -> int:
        """Of a query or a key."""
        return self.plain_size + self.rotary_size


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers with a mixture of experts."""

    count: int
    chosen: int
    """For each token."""
    ffn_hidden: int
    shared_ffn_hidden: int
    """Of the expert that all tokens go to; 0 for none."""
    first_layer: int
    """Layers before it are dense."""
    sigmoid: bool
    """Scores are sigmoids, and a frozen bias takes part in the choice (arXiv 2408.15664). Else they are a softmax."""
    groups: int = 1
    chosen_groups: int = 1
    """Experts are chosen from this many groups alone."""
    scale: float = 1.0
    """Of the weighted sum of the chosen."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder."""

    family: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    """Of queries, keys and values; a model with latent attention has its own."""
    vocabulary: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    qk_norm: bool = False
    """Whether queries and keys are normalised for each head."""
    qkv_bias: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    mtp_layers: int = 0
    """Layers after the others that predict further tokens."""
    mtp_built: bool = False
    """Whether there are such layers in the model that is trained; else they are exported as they were."""

    @property
    def dense_layers(self) -> int:
        """How many layers, the first ones, have no experts."""
        return self.experts.first_layer if self.experts else self.layers


def read_config(checkpoint: Path, overrides: Fields = MappingProxyType({})) -> ModelConfig:
    """Read config.json, with some of its fields replaced.

    Raises:
        ModelError: A model type or an option is not supported, or the family does not know a replaced field.
        SpecError: A replaced field does not fit the checkpoint.
    """
    path = checkpoint / "config.json"
    config = Reading(config_of(checkpoint, overrides))
    origin = f"{path}, with model.overrides" if overrides else str(path)
    try:
        family = config.get("model_type")
        if family not in _FAMILIES:
            raise ValueError(f"model_type {family!r} is not supported; supported are {', '.join(_FAMILIES)}")
        model = _FAMILIES[family](config)
    except KeyError as error:
        raise ModelError(f"{origin}: {error.args[0]} is missing") from None
    except ValueError as error:
        raise ModelError(f"{origin}: {error}") from None
    if unknown := next(config.unread(overrides), None):
        instead = "; rope_parameters, which is there too, goes before" if unknown == "rope_scaling" else ""
        raise ModelError(f"model.overrides.{unknown}: not read for {family} with the other fields of {path}{instead}")
    return model


def _dense(config: Fields, rope: Rope | None = None, **more: Any) -> ModelConfig:
    """What all families share, and more; unscaled rope if none is given."""
    only(config, hidden_act="silu", mlp_bias=False, use_sliding_window=False)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ModelConfig(
        family=config["model_type"],
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn_hidden=config["intermediate_size"],
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        vocabulary=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope=rope or read_rope(config),
        tied_embeddings=config.get("tie_word_embeddings", False),
        **more,
    )


def _llama(config: Fields) -> ModelConfig:
    only(config, attention_bias=False)
    return _dense(config, rope=read_rope(config, scaling="llama3"))


def _qwen2(config: Fields) -> ModelConfig:
    return _dense(config, qkv_bias=True)


def _qwen3(config: Fields) -> ModelConfig:
    only(config, attention_bias=False)
    return _dense(config, qk_norm=True)


def _qwen3_moe(config: Fields) -> ModelConfig:
    only(config, attention_bias=False, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    count = config["num_local_experts" if "num_local_experts" in config else "num_experts"]  # transformers 5, and 4
    chosen = config["num_experts_per_tok"]
    if chosen > count:
        raise ValueError(f"num_experts_per_tok = {chosen} are more than the {count} experts")
    experts = Experts(
        count=count,
        chosen=chosen,
        ffn_hidden=config["moe_intermediate_size"],
        shared_ffn_hidden=0,
        first_layer=0,
        sigmoid=False,
    )
    return _dense(config, qk_norm=True, experts=experts)


def _deepseek_v3(config: Fields) -> ModelConfig:
    # Megatron has one epsilon for all norms; Hugging Face always takes 1e-6 for those of compressed vectors.
    only(config, attention_bias=False, moe_layer_freq=1, rope_interleave=True, rms_norm_eps=1e-6)
    if config["q_lora_rank"] is None:
        raise ValueError("q_lora_rank is null: queries that are not compressed are not supported")
    latent = LatentAttention(
        query_rank=config["q_lora_rank"],
        key_value_rank=config["kv_lora_rank"],
        plain_size=config["qk_nope_head_dim"],
        rotary_size=config["qk_rope_head_dim"],
        value_size=config["v_head_dim"],
    )
    rope = read_rope(config, scaling="yarn")
    if rope.fraction != 1:
        raise ValueError(f"partial_rotary_factor = {rope.fraction} is not supported; only 1 is")
    return _dense(
        config,
        latent=latent,
        experts=_sigmoid_experts(config),
        rope=rope,
        mtp_layers=config.get("num_nextn_predict_layers", 0),
    )


def _glm4_moe(config: Fields) -> ModelConfig:
    return _dense(
        config,
        qk_norm=config.get("use_qk_norm", False),
        qkv_bias=config.get("attention_bias", False),
        experts=_sigmoid_experts(config),
        rope=read_rope(config, fraction=0.5),
        mtp_layers=config.get("num_nextn_predict_layers", 0),
    )


def _sigmoid_experts(config: Fields) -> Experts:
    only(config, norm_topk_prob=True, scoring_func="sigmoid", topk_method="noaux_tc")
    chosen, groups, chosen_groups = config["num_experts_per_tok"], config["n_group"], config["topk_group"]
    count = config["n_routed_experts"]
    if count % groups or chosen_groups > groups:
        raise ValueError(f"n_group = {groups} must divide the {count} experts, and topk_group = {chosen_groups} fit in")
    if chosen > count // groups * chosen_groups:
        raise ValueError(f"num_experts_per_tok = {chosen} are more than the experts of topk_group = {chosen_groups}")
    # Both choose groups by the sum of their best scores: Hugging Face of the best two, Megatron of as many as it takes.
    if groups > 1 and chosen != 2 * chosen_groups:
        raise ValueError(f"num_experts_per_tok = {chosen} is not twice topk_group = {chosen_groups}: not supported")
    return Experts(
        count=count,
        chosen=chosen,
        ffn_hidden=config["moe_intermediate_size"],
        shared_ffn_hidden=config["moe_intermediate_size"] * config["n_shared_experts"],
        first_layer=config["first_k_dense_replace"],
        sigmoid=True,
        groups=groups,
        chosen_groups=chosen_groups,
        scale=config["routed_scaling_factor"],
    )


_FAMILIES: Mapping[str, Callable[[Fields], ModelConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
}
