"""Multi-head latent attention (arXiv 2405.04434) over packed sequences.

Shapes: T tokens that this rank has, B batch (1 for a pack), N heads of this rank, Q size of a query or key, P of its
part without position, R of its rotary part, V of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.trainer.attention import rotate
from services.trainer.fusion import fused
from services.trainer.mcore_fixes import LatentSelfAttention
from services.trainer.megatron import PackedSeqParams, gather_from_sequence_parallel_region


class RotaryLatentAttention(LatentSelfAttention):
    """Megatron's latent attention for training. Its own rotates segment by segment, with the lengths on the host."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  of its many parameters these are given
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: tuple[Tensor, Tensor],
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend. `hidden_states` are `[T, B, hidden]`, `rotary_pos_emb` cosines and sines `[T, 1, 1, R]`."""
        config: Any = self.config
        query_norm: Any = self.q_layernorm
        norm: Any = self.kv_layernorm
        queries, latent = self._qkv_down_projection(hidden_states)
        latent, rotary_key = latent.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], -1)
        if config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key)
        query, _bias = self.linear_q_up_proj(query_norm(queries))
        mixed, _bias = self.linear_kv_up_proj(norm(latent))
        sizes = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        heads = latent_heads(query, mixed, rotary_key, *rotary_pos_emb, *sizes)
        query, key, value = heads if packed_seq_params is None else (x.squeeze(1) for x in heads)
        recompute = self.checkpoint_core_attention and self.training
        attend: Any = self._checkpointed_attention_forward if recompute else self._run_core_attention
        out = attend(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        return self.linear_proj(out.reshape(*mixed.shape[:2], -1))


@fused(rows=3)
def latent_heads(
    query: Tensor,
    mixed: Tensor,
    rotary_key: Tensor,
    cosines: Tensor,
    sines: Tensor,
    plain: int,
    rotary: int,
    value: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys `[T, B, N, Q]`, and values `[T, B, N, V]`.

    Args:
        query: `[T, B, N * Q]`, of each head the P and the R.
        mixed: `[T, B, N * (P + V)]`, of each head its key without position, and its value.
        rotary_key: `[T, B, R]`, of all heads the same.
        cosines, sines: `[T, 1, 1, R]`.
        plain, rotary, value: P, R and V.
    """
    plain_query, rotary_query = query.unflatten(-1, (-1, plain + rotary)).split([plain, rotary], -1)
    plain_key, values = mixed.unflatten(-1, (-1, plain + value)).split([plain, value], -1)
    rotary_query = rotate(pairs_to_halves(rotary_query), cosines, sines)
    rotated_key = rotate(pairs_to_halves(rotary_key.unsqueeze(-2)), cosines, sines)
    queries = torch.cat((plain_query, rotary_query), -1)
    keys = torch.cat((plain_key, rotated_key.expand(*plain_key.shape[:-1], -1)), -1)
    return queries, keys, values.contiguous()


def pairs_to_halves(x: Tensor) -> Tensor:
    """`[..., R]`: first the even elements, then the odd ones; DeepSeek's checkpoints rotate neighbours."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
