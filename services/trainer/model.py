"""The policy model: Megatron's GPTModel, built from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.spec import ParallelSpec
from services.trainer.attention import CoreAttention, RotarySelfAttention
from services.trainer.dispatch import ExpertLayer
from services.trainer.experts import GroupedExperts
from services.trainer.latent_attention import RotaryLatentAttention
from services.trainer.layout import check_layout
from services.trainer.megatron import (
    DEVICE,
    HAVE_TE,
    MLP,
    ON_CUDA,
    ONE_RANK,
    AttnMaskType,
    ColumnParallelLinear,
    GPTModel,
    IdentityOp,
    MLASelfAttentionSubmodules,
    MLATransformerConfig,
    MLPSubmodules,
    ModuleSpec,
    MoESubmodules,
    RowParallelLinear,
    SelfAttentionSubmodules,
    SharedExpertMLP,
    TEDotProductAttention,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_bias_dropout_add,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    group_sizes,
    parallel_state,
)
from services.trainer.model_config import Experts, LatentAttention, ModelConfig, Rope

DISPATCHER = "alltoall"
"""Megatron's other one forbids variable lengths, without experts too."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        found: Any = super()._preprocess(
            input_ids, position_ids, decoder_input, inference_context, packed_seq_params, padding_mask
        )
        hidden, angles, *rest = found
        scale = 1.0
        if self.config.multi_latent_attention:
            angles, scale = self._latent_angles(hidden, packed_seq_params)
        if packed_seq_params is not None:
            angles = angles[position_ids.flatten()]
        dtype = self.config.params_dtype
        return hidden, ((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)), *rest

    def _latent_angles(self, hidden: Tensor, packed_seq_params: Any) -> tuple[Tensor, float]:
        """Angles of every position `[L, 1, 1, D]`, and by what cosines and sines are multiplied (YaRN).

        Megatron has them in each layer with latent attention, all the same.
        """
        layer: Any = self.decoder.layers[0]
        rotary = layer.self_attention.rotary_pos_emb
        length = rotary.get_rotary_seq_len(None, self.decoder, hidden, self.config, packed_seq_params)
        found = rotary(length, packed_seq=packed_seq_params is not None)
        return found if isinstance(found, tuple) else (found, 1.0)


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
        bias_activation_fusion=ON_CUDA,
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


def _layer_spec(config: TransformerConfig, *, experts: bool) -> ModuleSpec:
    add_residual: Any = get_bias_dropout_add
    linears = MLPSubmodules(ColumnParallelLinear, RowParallelLinear)
    dense = partial(MLP.as_mlp_submodule, submodules=linears)
    grouped: Any = GroupedExperts
    sparse = MoESubmodules(grouped, partial(SharedExpertMLP, submodules=linears))
    latent = isinstance(config, MLATransformerConfig)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_latent_attention_spec(config) if latent else _attention_spec(config),
            self_attn_bda=add_residual,
            pre_mlp_layernorm=RMSNorm,
            mlp=partial(ExpertLayer, submodules=sparse) if experts else dense,
            mlp_bda=add_residual,
        ),
    )


def _attention_spec(config: TransformerConfig) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
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


def _latent_attention_spec(config: MLATransformerConfig) -> ModuleSpec:
    return ModuleSpec(
        module=RotaryLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=TEDotProductAttention if HAVE_TE and config.bf16 else CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )


def build_model(model: ModelConfig, dtype: torch.dtype, parallel: ParallelSpec = ONE_RANK) -> list[PolicyModel]:
    """This rank's part of the model with uninitialised weights, on the device: a chunk for each virtual stage.

    Megatron must be initialised.

    Args:
        model: The whole model.
        dtype: Of parameters and activations.
        parallel: What Megatron's groups were opened with.

    Raises:
        ModelError: The model cannot be laid out so.
    """
    check_layout(model, parallel)
    config = transformer_config(model, dtype, parallel)
    stages = range(parallel.virtual_stages) if parallel.virtual_stages > 1 else (None,)
    return [_build_chunk(model, config, stage) for stage in stages]


def _build_chunk(model: ModelConfig, config: TransformerConfig, stage: int | None) -> PolicyModel:
    first = get_transformer_layer_offset(config, stage)
    layers = range(first, first + get_num_layers_to_build(config, stage))
    specs = [_layer_spec(config, experts=layer >= model.dense_layers) for layer in layers]
    block: Any = TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
    return PolicyModel(
        config,
        block,
        vocab_size=model.vocabulary,
        max_sequence_length=model.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope.theta,
        rotary_percent=model.rope.fraction,
        rope_scaling=model.rope.llama3_factor is not None,
        rope_scaling_factor=model.rope.llama3_factor or 1.0,
        vp_stage=stage,
    )
