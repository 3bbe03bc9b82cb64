"""Causal self-attention over packed sequences, through torch's scaled_dot_product_attention.

Shapes: T tokens of the pack, S segments, L longest segment, N query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.trainer.megatron import MegatronModule, PackedSeqParams, TransformerConfig

MAX_PADDING_RATIO = 4
"""A pack is padded while that costs less attention than this; beyond it, one call for each segment is cheaper."""
LONG_SEGMENT_TOKENS = 1024
"""From here on one segment keeps the device busy, and padding only wastes work."""


@dataclass
class Segments(PackedSeqParams):
    """Megatron's description of a pack, and how to attend inside it."""

    lengths: tuple[int, ...] = ()
    padded_rows: Tensor | None = None
    """`[T]`: row of each token in the flattened `[S, L]` batch; None to attend segment by segment."""


def make_segments(lengths: tuple[int, ...], device: torch.device) -> Segments:
    """Describe a pack of segments of these lengths, each at least 1."""
    sizes = torch.tensor(lengths)
    bounds = F.pad(sizes.cumsum(0), (1, 0))
    longest = max(lengths)
    rows = None
    if should_pad(lengths):
        shift = torch.arange(len(lengths)) * longest - bounds[:-1]
        rows = (torch.arange(int(bounds[-1])) + shift.repeat_interleave(sizes)).to(device)
    bounds = bounds.int().to(device)
    return Segments(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
        padded_rows=rows,
    )


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
        if packed_seq_params.padded_rows is not None:
            return self._attend_padded(query, key, value, packed_seq_params)
        lengths = packed_seq_params.lengths
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(q[None], k[None], v[None])[0] for q, k, v in parts])

    def _attend_padded(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        """Padding stands right of each segment, where the causal mask hides it from every real token."""
        rows, batch = segments.padded_rows, (len(segments.lengths), segments.max_seqlen_q)
        assert rows is not None

        def pad(x: Tensor) -> Tensor:
            return x.new_zeros(batch[0] * batch[1], *x.shape[1:]).index_copy(0, rows, x).unflatten(0, batch)

        return self._attend(pad(query), pad(key), pad(value)).flatten(0, 1)[rows]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[S, L, N, D]`, `[S, L, K, D]` twice -> `[S, L, N * D]`."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(2)
