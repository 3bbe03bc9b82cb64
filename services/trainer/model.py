"""The policy model: Megatron's GPTModel, built from the `config.json` of a Hugging Face checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from services.common.spec import ParallelSpec
from services.trainer.attention import CoreAttention, RotarySelfAttention, Segments
from services.trainer.dispatch import ExpertLayer
from services.trainer.experts import GroupedExperts
from services.trainer.latent_attention import RotaryLatentAttention
from services.trainer.layout import check_layout
from services.trainer.megatron import (
    DEVICE,
    HAVE_TE,
    MLP,
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
    parallel_state,
    weight_of,
)
from services.trainer.model_config import ModelConfig
from services.trainer.model_options import transformer_config
from services.trainer.mtp import Predictor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor and the mark that its sequence parallelism looks for."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=DEVICE)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class PolicyModel(GPTModel):
    """GPTModel whose rotary embedding follows the position ids of a pack."""

    mtp: Predictor
    """On the last stage, if the model has it."""

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

    def predict_ahead(
        self, hidden: Tensor, tokens: Tensor, position_ids: Tensor, segments: Segments | None = None
    ) -> Tensor:
        """What the layer for multi-token prediction makes of the last hidden states; as `Predictor.predict`."""
        _, angles, *_ = self._preprocess(tokens, position_ids, hidden, packed_seq_params=segments)
        own = weight_of(self.embedding.word_embeddings) if self.pre_process else None
        return self.mtp.predict(hidden, tokens, position_ids, angles, segments, own)


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
    chunk = PolicyModel(
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
    if model.mtp_built and chunk.post_process:
        layer = _layer_spec(config, experts=model.layers >= model.dense_layers)
        chunk.mtp = Predictor(config, layer, RMSNorm, chunk)
    return chunk
