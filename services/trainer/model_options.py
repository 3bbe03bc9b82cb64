"""A model in Megatron's own words."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from services.common.spec import ParallelSpec
from services.trainer.megatron import MLATransformerConfig, TransformerConfig, group_sizes
from services.trainer.model_config import Experts, LatentAttention, ModelConfig
from services.trainer.rope import Rope

DISPATCHER = "alltoall"
"""Megatron's other one forbids variable lengths, without experts too."""


def transformer_config(model: ModelConfig, dtype: torch.dtype, parallel: ParallelSpec) -> TransformerConfig:
    """Megatron's configuration of a model. Gradients add up over micro-batches and ranks, undivided."""
    kind = MLATransformerConfig if model.latent else TransformerConfig
    return kind(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn_hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_size,
        qk_layernorm=model.qk_norm or model.latent is not None,
        add_qkv_bias=model.qkv_bias,
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
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        sequence_parallel=parallel.tensor > 1,
        variable_seq_lengths=parallel.pipeline > 1,
        batch_p2p_comm=parallel.virtual_stages == 1,  # batched, the two directions between two stages get mixed up
        overlap_p2p_comm=parallel.virtual_stages > 1,
        moe_token_dispatcher_type=DISPATCHER,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers or None,
        **group_sizes(parallel),
        **_recompute_options(parallel.recompute, sparse=model.experts is not None),
        **(_latent_options(model.latent, model.rope) if model.latent else {}),
        **(_expert_options(model.experts, model.layers) if model.experts else {}),
    )


def _recompute_options(recompute: str, *, sparse: bool) -> dict[str, Any]:
    """Selective: the core of attention, which with context parallelism has whole keys and values, and all experts."""
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn", *(["moe"] if sparse else [])]}
    return {}


def _latent_options(latent: LatentAttention, rope: Rope) -> dict[str, Any]:
    """Of MLATransformerConfig, whose own defaults are those of a scaled model."""
    yarn = rope.yarn
    scaling = (
        {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }
        if yarn
        else {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    )
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_size,
        "qk_pos_emb_head_dim": latent.rotary_size,
        "v_head_dim": latent.value_size,
        "rotary_base": rope.theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        **scaling,
    }


def _expert_options(experts: Experts, layers: int) -> dict[str, Any]:
    """The router's scores are exact, and nothing but the policy's loss moves it: no balance loss, a frozen bias."""
    grouped = experts.groups > 1
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn_hidden,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden or None,
        "moe_layer_freq": [int(layer >= experts.first_layer) for layer in range(layers)],
        "moe_router_topk": experts.chosen,
        "moe_router_score_function": "sigmoid" if experts.sigmoid else "softmax",
        "moe_router_pre_softmax": experts.sigmoid,
        "moe_router_enable_expert_bias": experts.sigmoid,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": experts.groups if grouped else None,
        "moe_router_group_topk": experts.chosen_groups if grouped else None,
        "moe_router_topk_scaling_factor": experts.scale,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
