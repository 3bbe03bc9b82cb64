"""Multi-token prediction: a layer that predicts the token after the next one (arXiv 2412.19437, section 2.2).

At place t it takes the model's last hidden state and the embedding of token t + 1, and predicts token t + 2 through the
model's output layer:

    h' = layer(M [RMSNorm(embedding of t + 1); RMSNorm(h)])

It learns alone: hidden states, embedding and output layer get no gradient from it. It is Megatron's layer, on the last
stage, told which tokens are ahead: those come with the pack, so that no rank asks another for them.

Shapes: T tokens of a pack on this rank, H hidden, V rows of this rank's part of the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from services.trainer.attention import Segments
from services.trainer.layout import vocabulary_part
from services.trainer.megatron import (
    DEVICE,
    ColumnParallelLinear,
    ModuleSpec,
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    TransformerConfig,
    parallel_state,
    recompute_in_backward,
    reduce_scatter_to_sequence_parallel_region,
    weight_of,
)

if TYPE_CHECKING:
    from services.trainer.model import PolicyModel


class Predictor(MultiTokenPredictionBlock):
    """One layer. Its gradients are clipped by themselves, so that the policy learns as if it were not there."""

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, norm: Any, policy: PolicyModel) -> None:
        """On a stage that has no embedding, room for a copy of it, which `fetch_embedding` fills.

        Args:
            config: Of the policy.
            layer: The whole layer inside.
            norm: Class of the norms.
            policy: Whose last stage it is on.
        """
        config = copy.copy(config)
        config.mtp_num_layers, config.mtp_detach_heads = 1, True
        parts: Any = MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=layer
        )
        spec: Any = MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=parts)])
        super().__init__(config, spec, vp_stage=policy.vp_stage, pg_collection=policy.pg_collection)
        self.embedding: Tensor | None
        size = (policy.vocab_size // config.tensor_model_parallel_size, config.hidden_size)
        room = None if policy.pre_process else torch.empty(size, dtype=config.params_dtype, device=DEVICE)
        self.register_buffer("embedding", room, persistent=False)

    def predict(
        self,
        hidden: Tensor,
        tokens: Tensor,
        position_ids: Tensor,
        angles: Any,
        segments: Segments | None,
        embedding: Tensor | None,
    ) -> Tensor:
        """What its norm makes of the last hidden states, ready for the output layer.

        Args:
            hidden: `[T, 1, H]` the model's, or this rank's part of T.
            tokens: `[1, T]`, after each place the next token.
            position_ids: `[1, T]` as the model had them.
            angles: Rotary, as the model's layers have them.
            segments: Of the pack; None for a row that is one.
            embedding: `[V, H]`, if this stage has it.
        """
        layer: Any = self.layers[0]
        weight = self.embedding if embedding is None else embedding
        run = partial(
            layer.forward_single_position,
            next_token_ids=tokens,
            position_ids=position_ids,
            embedding=partial(self._look_up, weight),
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=segments,
        )
        if self.config.recompute_granularity == "full" and torch.is_grad_enabled():
            return recompute_in_backward(run, False, hidden.detach().requires_grad_())
        return run(hidden.detach())

    @torch.no_grad()
    def _look_up(self, weight: Any, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """`[T, 1, H]`, or with tensor parallelism this rank's part of T; without gradient."""
        local = input_ids - vocabulary_part(weight.shape[0]).first
        inside = (local >= 0) & (local < weight.shape[0])
        found = F.embedding(local.where(inside, 0), weight).masked_fill(~inside[..., None], 0.0).transpose(0, 1)
        return reduce_scatter_to_sequence_parallel_region(found) if self.config.sequence_parallel else found


@torch.no_grad()
def fetch_embedding(chunks: Sequence[PolicyModel]) -> None:
    """Bring the first stage's embedding to the last stage; all ranks call it whenever the weights have changed."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    first, last = chunks[0], chunks[-1]
    group: Any = parallel_state.get_embedding_group(check_initialized=False)
    if first.pre_process:
        dist.broadcast(weight_of(first.embedding.word_embeddings).detach(), group=group, group_src=0)
    elif last.post_process:
        dist.broadcast(last.mtp.embedding, group=group, group_src=0)  # pyright: ignore[reportArgumentType]
