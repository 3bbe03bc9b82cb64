"""The policy model: Megatron's GPTModel, built from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.errors import FailedPrecondition
from services.trainer.attention import CoreAttention, RotarySelfAttention
from services.trainer.megatron import (
    DEVICE,
    HAVE_TE,
    MLP,
    ON_CUDA,
    AttnMaskType,
    ColumnParallelLinear,
    GPTModel,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    RowParallelLinear,
    SelfAttentionSubmodules,
    TEDotProductAttention,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_bias_dropout_add,
)

FAMILIES = ("qwen3", "llama")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelError(FailedPrecondition):
    """The checkpoint's model cannot be trained here; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What defines a dense model, from config.json."""

    family: str
    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    max_positions: int
    norm_eps: float
    rope_theta: int
    tied_embeddings: bool

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised for each head."""
        return self.family == "qwen3"


def read_config(checkpoint: Path) -> ModelConfig:
    """Read config.json. Raises ModelError for a model type or an option that is not supported."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{path}: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    _refuse_unsupported(config, path)
    return ModelConfig(
        family=family,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn_hidden=config["intermediate_size"],
        heads=config["num_attention_heads"],
        key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        vocabulary=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=int(_rope(config)["rope_theta"]),
        tied_embeddings=config.get("tie_word_embeddings", False),
    )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters, in today's spelling (`rope_parameters`) or the one before it."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type") or found.get("type") or "default"
    return {"rope_theta": config.get("rope_theta", 10000.0), **found, "rope_type": kind}


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ModelError(f"{path}: {name} = {config[name]!r} is not supported; only {value!r} is")
    if (kind := _rope(config)["rope_type"]) != "default":
        raise ModelError(f"{path}: rope scaling of type {kind!r} is not supported; only unscaled rope is")


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor and the mark that its sequence parallelism looks for."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=DEVICE)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class PolicyModel(GPTModel):
    """GPTModel whose rotary embedding follows the position ids of a pack."""

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Any = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        padding_mask: Any = None,
    ) -> tuple[Any, ...]:
        """Cosines and sines of the rotary angles for each token of the pack, `[T, 1, 1, D]`, once for all layers."""
        hidden, angles, *rest = super()._preprocess(
            input_ids, position_ids, decoder_input, inference_context, packed_seq_params, padding_mask
        )
        assert angles is not None, "the position embedding is rope"
        if packed_seq_params is not None:
            angles = angles[position_ids.flatten()]
        dtype = self.config.params_dtype
        return hidden, (angles.cos().to(dtype), angles.sin().to(dtype)), *rest


def transformer_config(model: ModelConfig, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of a dense model. Gradients add up over micro-batches and ranks, undivided."""
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn_hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_size,
        qk_layernorm=model.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        perform_initialization=False,
        transformer_impl="local",
        bias_activation_fusion=ON_CUDA,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    add_residual: Any = get_bias_dropout_add
    attention = ModuleSpec(
        module=RotarySelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=TEDotProductAttention if HAVE_TE and config.bf16 else CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    mlp = partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(ColumnParallelLinear, RowParallelLinear))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=add_residual,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=add_residual,
        ),
    )


def build_model(model: ModelConfig, dtype: torch.dtype) -> PolicyModel:
    """The model with uninitialised weights, on the device. Megatron must be initialised."""
    config = transformer_config(model, dtype)
    block: Any = TransformerBlockSubmodules(layer_specs=[_layer_spec(config)] * model.layers, layer_norm=RMSNorm)
    return PolicyModel(
        config,
        block,
        vocab_size=model.vocabulary,
        max_sequence_length=model.max_positions,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
    )
