"""Causal self-attention over packed sequences.

On CUDA in half precision one call of flash attention for the whole pack; else torch's scaled_dot_product_attention.

Context-parallel ranks gather all keys and values; each of a rank's chunks attends to its segment up to its own end. One
rank alone has one chunk for each segment, and nothing to gather.

Shapes: T tokens of the pack that this rank has, S chunks, L longest chunk, N query heads, K key heads, D head size,
B batch (1 for a pack).
"""

from __future__ import annotations

import inspect
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from services.trainer.context import ALONE, ContextRank
from services.trainer.fusion import fused
from services.trainer.megatron import (
    MegatronModule,
    PackedSeqParams,
    SelfAttention,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    parallel_state,
    weight_of,
)

MAX_PADDING_RATIO = 4
"""A pack is padded while that costs less attention than this; beyond it, one call for each segment is cheaper."""
LONG_SEGMENT_TOKENS = 1024
"""From here on one segment keeps the device busy, and padding only wastes work."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
"""What flash attention computes in."""


def causal_options(parameters: Container[str]) -> dict[str, Any]:
    """How a `varlen_attn` with these parameters is told to be causal, with fewer key heads than query heads.

    Up to torch 2.10 it has `is_causal`, from 2.11 on `window_size`; 2.13 wants to be told of grouped heads, which the
    kernel beneath has always taken.
    """
    causal = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    return {**causal, "enable_gqa": True} if "enable_gqa" in parameters else causal


_CAUSAL = causal_options(inspect.signature(varlen_attn).parameters)


@dataclass
class Segments(PackedSeqParams):
    """Megatron's description of a pack of whole segments, and how the chunks that this rank has attend inside them."""

    lengths: tuple[int, ...] = ()
    """Tokens of each chunk."""
    key_lengths: tuple[int, ...] = ()
    """Tokens that each chunk attends to, itself the last of them."""
    bounds: Tensor | None = None
    """`[S + 1]` int32, cumulative `lengths`."""
    key_bounds: Tensor | None = None
    """`[S + 1]` int32, cumulative `key_lengths`."""
    key_rows: Tensor | None = None
    """`[sum of key_lengths]`: where those tokens lie in what context-parallel ranks have, one rank after another; None
    if this rank has them all."""
    padded_rows: Tensor | None = None
    """`[T]`: row of each token in the flattened `[S, L]` batch; None to attend chunk by chunk."""


def make_segments(lengths: tuple[int, ...], device: torch.device, context: ContextRank = ALONE) -> Segments:
    """Describe a pack of segments of these lengths, each at least 1, and a multiple of `context.chunks_per_segment`."""
    chunks, longest = context.chunks(lengths), max(lengths)
    queries = tuple(one.end - one.begin for one in chunks)
    keys = tuple(one.end - one.segment for one in chunks)
    whole, shared = _bounds(lengths, device), context.size > 1
    return Segments(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=queries,
        key_lengths=keys,
        bounds=_bounds(queries, device),
        key_bounds=_bounds(keys, device),
        key_rows=context.key_rows(lengths).to(device) if shared else None,
        padded_rows=_padded_rows(lengths).to(device) if not shared and should_pad(lengths) else None,
    )


def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(device)


def _padded_rows(lengths: tuple[int, ...]) -> Tensor:
    sizes = torch.tensor(lengths)
    shift = torch.arange(len(lengths)) * max(lengths) - (sizes.cumsum(0) - sizes)
    return torch.arange(sum(lengths)) + shift.repeat_interleave(sizes)


def should_pad(lengths: tuple[int, ...]) -> bool:
    """Whether one padded call is cheaper than a call for each segment."""
    longest = max(lengths)
    return longest < LONG_SEGMENT_TOKENS and longest * len(lengths) <= MAX_PADDING_RATIO * sum(lengths)


class CoreAttention(MegatronModule):
    """Megatron's core attention: a pack `[T, N, D]`, or a batch of whole sequences `[L, S, N, D]`."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Attend; the answer has the shape of `query` with heads and head size flattened."""
        assert attention_mask is None, "the only mask is the causal one"
        if packed_seq_params is None:
            return self._attend(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)).transpose(0, 1)
        assert isinstance(packed_seq_params, Segments), "packs are made by make_segments"
        if packed_seq_params.key_rows is not None:
            key, value = (_gather(one, packed_seq_params.key_rows) for one in (key, value))
        if query.is_cuda and query.dtype in FLASH_DTYPES:
            return self._attend_flash(query, key, value, packed_seq_params)
        if packed_seq_params.padded_rows is not None:
            return self._attend_padded(query, key, value, packed_seq_params)
        lengths, key_lengths = packed_seq_params.lengths, packed_seq_params.key_lengths
        parts = zip(query.split(lengths), key.split(key_lengths), value.split(key_lengths), strict=True)
        return torch.cat([self._attend(q[None], k[None], v[None])[0] for q, k, v in parts])

    def _attend_flash(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """The causal mask of the kernel is aligned at the last query and the last key."""
        bounds, key_bounds = segments.bounds, segments.key_bounds
        assert bounds is not None and key_bounds is not None
        longest = max(segments.lengths), max(segments.key_lengths)
        out = varlen_attn(query, key, value, bounds, key_bounds, *longest, scale=self.softmax_scale, **_CAUSAL)
        assert isinstance(out, Tensor)
        return out.flatten(1)

    def _attend_padded(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """Padding stands right of each segment, where the causal mask hides it from every real token."""
        rows, batch = segments.padded_rows, (len(segments.lengths), segments.max_seqlen_q)
        assert rows is not None
        if len(rows) == batch[0] * batch[1]:
            return self._attend(*(x.unflatten(0, batch) for x in (query, key, value))).flatten(0, 1)

        def pad(x: Tensor) -> Tensor:
            return x.new_zeros(batch[0] * batch[1], *x.shape[1:]).index_copy(0, rows, x).unflatten(0, batch)

        return self._attend(pad(query), pad(key), pad(value)).flatten(0, 1)[rows]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[S, L, N, D]`, `[S, M, K, D]` twice -> `[S, L, N * D]`; the queries stand at the end of the M keys."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        mask = None if q.shape[2] == k.shape[2] else _causal_mask(q.shape[2], k)
        options = {"scale": self.softmax_scale, "enable_gqa": q.shape[1] != k.shape[1]}
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, **options)
        return out.transpose(1, 2).flatten(2)


def _causal_mask(queries: int, key: Tensor) -> Tensor:
    """`[L, M]`: what each of the last L of M keys' tokens may look at; `key` is `[..., M, D]`."""
    keys = key.shape[-2]
    return torch.ones(queries, keys, dtype=torch.bool, device=key.device).tril(keys - queries)


def _gather(part: Tensor, rows: Tensor) -> Tensor:
    """Rows of what all context-parallel ranks have; the backward pass adds what they make of each."""
    group = parallel_state.get_context_parallel_group()
    return gather_from_sequence_parallel_region(part, group=group).index_select(0, rows)


class RotarySelfAttention(SelfAttention):
    """Megatron's self-attention for training, with everything between projection and core attention in one function.

    Needs at least one query group for each tensor-parallel rank.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  of its many parameters these are given
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: tuple[Tensor, Tensor],
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend. `hidden_states` are `[T, B, hidden]`, `rotary_pos_emb` cosines and sines `[T, 1, 1, D]`."""
        projection: Any = self.linear_qkv
        attend: Any = self.core_attention
        mixed, _bias = projection(hidden_states)
        weights = [weight_of(norm) for norm in (self.q_layernorm, self.k_layernorm)]
        groups, size = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = split_heads(mixed, *rotary_pos_emb, weights[0], weights[1], groups, size, self.config.layernorm_epsilon)
        query, key, value = heads if packed_seq_params is None else (x.squeeze(1) for x in heads)
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        mask = {"attention_mask": attention_mask, "attn_mask_type": self.attn_mask_type}
        out = attend(query, key, value, **mask, packed_seq_params=packed_seq_params)
        return self.linear_proj(out.reshape(*mixed.shape[:2], -1))


@fused(rows=3)
def split_heads(
    mixed: Tensor,
    cosines: Tensor,
    sines: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    groups: int,
    size: int,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[T, B, N, D]` and keys `[T, B, K, D]`, normalised for each head and rotated, and values `[T, B, K, D]`.

    Args:
        mixed: `[T, B, (N + 2K) * D]`: for each of the K groups its queries, then its key, then its value.
        cosines, sines: `[T, 1, 1, D]`, or fewer than D.
        query_weight, key_weight: `[D]` of the RMSNorm of each head; None for none.
        groups, size: K and D.
        norm_eps: Of the RMSNorm.
    """
    heads = mixed.unflatten(-1, (groups, -1, size))
    query, key, value = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
    if query_weight is not None:
        query = F.rms_norm(query, (size,), query_weight, norm_eps)
    if key_weight is not None:
        key = F.rms_norm(key, (size,), key_weight, norm_eps)
    return rotate(query, cosines, sines), rotate(key, cosines, sines), value.contiguous()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) in the layout of Hugging Face.

    The halves of what angles are given for are rotated, which is D or the first part of it.
    """
    rotated, rest = x.split([cosines.shape[-1], x.shape[-1] - cosines.shape[-1]], -1)
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cosines + torch.cat((-second, first), -1) * sines
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated
