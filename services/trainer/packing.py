"""Packs the samples of a micro-batch into one row of tokens.

Shapes: T tokens that go through the model, R response tokens. A sample of p prompt and r response tokens takes
p + r - 1 places: the last response token is only predicted, never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from services.trainer.attention import Segments, make_segments
from services.trainer.batch import Batch, MicroBatch, Samples


@dataclass(frozen=True, slots=True)
class Pack:
    """One micro-batch, ready for the model."""

    tokens: Tensor
    """`[1, T]` token ids."""
    position_ids: Tensor
    """`[1, T]`, from 0 in each sample."""
    segments: Segments
    """Where each sample lies."""
    places: Tensor
    """`[R]`: the place in `[T]` whose logits predict each response token."""
    targets: Tensor
    """`[R]` response token ids."""
    mask: Tensor
    """`[R]` float32 loss mask."""
    weights: Tensor
    """`[R]` float32: mask / (rollout's denominator x rollouts of the optimizer step). A quantity summed with these
    weights over all packs of the step is its mean over rollouts, however the step is cut into packs."""
    advantages: Tensor
    """`[R]` float32."""
    rollout_log_probs: Tensor
    """`[R]` float32, as the engine reported them."""


def make_pack(batch: Batch, micro_batch: MicroBatch, samples: Samples, device: torch.device, multiple: int = 1) -> Pack:
    """Pack one micro-batch.

    Args:
        batch: The whole batch.
        micro_batch: Which rows; none where a rank has less to do than others.
        samples: Those of the micro-batch at least, by row.
        device: Of the tensors.
        multiple: T is one of this; what is missing is filled by a segment of its own, that nothing looks at.
    """
    mine = [samples[row] for row in micro_batch.rows]
    rows = [batch.rows[row] for row in micro_batch.rows]
    lengths = tuple(len(one.prompt) + max(len(one.response) - 1, 0) for one in mine)
    starts = list(accumulate(lengths, initial=0))[:-1]
    places = [
        range(start + len(one.prompt) - 1, start + len(one.prompt) - 1 + len(one.response))
        for start, one in zip(starts, mine, strict=True)
    ]
    counts = torch.tensor([len(one.response) for one in mine], dtype=torch.long)
    rollouts = batch.rollouts_per_step[micro_batch.optimizer_step]
    mask = torch.tensor(_chain(one.loss_mask for one in mine), dtype=torch.float32)
    weight = torch.tensor([1.0 / (row.loss_denominator * rollouts) for row in rows])
    advantage = torch.tensor([row.advantage for row in rows])
    tokens = _chain((*one.prompt, *one.response)[:length] for one, length in zip(mine, lengths, strict=True))
    missing = -len(tokens) % multiple if tokens else multiple  # a micro-batch may have no rows
    if missing:
        tokens, lengths = [*tokens, *[0] * missing], (*lengths, missing)
    return Pack(
        tokens=torch.tensor([tokens]).to(device),
        position_ids=torch.tensor([_chain(map(range, lengths))]).to(device),
        segments=make_segments(lengths, device),
        places=torch.tensor(_chain(places), dtype=torch.long).to(device),
        targets=torch.tensor(_chain(one.response for one in mine), dtype=torch.long).to(device),
        mask=mask.to(device),
        weights=(mask * weight.repeat_interleave(counts)).to(device),
        advantages=advantage.repeat_interleave(counts).to(device),
        rollout_log_probs=torch.tensor(_chain(one.rollout_log_probs for one in mine), dtype=torch.float32).to(device),
    )


def _chain(parts: object) -> list:
    return list(chain.from_iterable(parts))  # pyright: ignore[reportArgumentType]
