"""Packs the samples of a micro-batch into one row of tokens.

Context-parallel ranks each have a part of the tokens, and of the response tokens those whose logits they compute: a sum
over all of them is that of one rank.

Shapes: T tokens that go through the model on this rank, R response tokens. A sample of p prompt and r response tokens
takes p + r - 1 places: the last response token is only predicted, never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from services.trainer.attention import Segments, make_segments
from services.trainer.batch import Batch, MicroBatch, Sample, Samples
from services.trainer.context import ALONE, ContextRank


@dataclass(frozen=True, slots=True)
class Ahead:
    """What multi-token prediction learns: each response token from one place before the one that predicts it.

    Only the first token of a sample has no such place, and the second, if the prompt is one token.
    """

    tokens: Tensor
    """`[1, T]`: the next token of the sample at each place, 0 at its last."""
    places: Tensor
    """`[A]`: the place in `[T]` that predicts each response token."""
    targets: Tensor
    """`[A]` response token ids."""
    weights: Tensor
    """`[A]` float32, those that the policy's loss gives to the same tokens."""


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
    ahead: Ahead | None
    """None unless asked for."""


def make_pack(
    batch: Batch,
    micro_batch: MicroBatch,
    samples: Samples,
    device: torch.device,
    multiple: int = 1,
    context: ContextRank = ALONE,
    *,
    ahead: bool = False,
) -> Pack:
    """Pack one micro-batch.

    Args:
        batch: The whole batch.
        micro_batch: Which rows; none where a rank has less to do than others.
        samples: Those of the micro-batch at least, by row.
        device: Of the tensors.
        multiple: T is one of this; what is missing is filled by a segment of its own, that nothing looks at.
        context: Which part of every sample; what a sample lacks to be cut is filled at its end.
        ahead: With what multi-token prediction learns.
    """
    mine = [samples[row] for row in micro_batch.rows]
    rows = [batch.rows[row] for row in micro_batch.rows]
    tokens, lengths = _lay_out(mine, context.chunks_per_segment, multiple)
    positions = torch.tensor(_chain(map(range, lengths)))
    held = context.places(lengths)
    rows_of = _rows_of(held, len(tokens))
    predicting = torch.tensor(_response_places(mine, lengths), dtype=torch.long)
    places = rows_of[predicting]
    here = places >= 0
    targets = torch.tensor(_chain(one.response for one in mine), dtype=torch.long)
    counts = torch.tensor([len(one.response) for one in mine], dtype=torch.long)
    rollouts = batch.rollouts_per_step[micro_batch.optimizer_step]
    mask = torch.tensor(_chain(one.loss_mask for one in mine), dtype=torch.float32)
    weight = torch.tensor([1.0 / (row.loss_denominator * rollouts) for row in rows])
    weights = mask * weight.repeat_interleave(counts)
    advantage = torch.tensor([row.advantage for row in rows])
    log_probs = torch.tensor(_chain(one.rollout_log_probs for one in mine), dtype=torch.float32)

    def look_ahead() -> Ahead:
        before = rows_of[predicting - 1].where(positions[predicting] > 0, -1)
        there = before >= 0
        return Ahead(
            tokens=_next_tokens(tokens, lengths)[None, held].to(device),
            places=before[there].to(device),
            targets=targets[there].to(device),
            weights=weights[there].to(device),
        )

    return Pack(
        tokens=torch.tensor([tokens])[:, held].to(device),
        position_ids=positions[None, held].to(device),
        segments=make_segments(lengths, device, context),
        places=places[here].to(device),
        targets=targets[here].to(device),
        mask=mask[here].to(device),
        weights=weights[here].to(device),
        advantages=advantage.repeat_interleave(counts)[here].to(device),
        rollout_log_probs=log_probs[here].to(device),
        ahead=look_ahead() if ahead else None,
    )


def _next_tokens(tokens: list[int], lengths: tuple[int, ...]) -> Tensor:
    """`[total]`: the next token at each place of the whole pack, 0 at the end of a segment."""
    following = torch.tensor(tokens).roll(-1)
    following[torch.tensor(lengths).cumsum(0) - 1] = 0
    return following


def _lay_out(samples: list[Sample], chunks: int, multiple: int) -> tuple[list[int], tuple[int, ...]]:
    """Tokens of the whole pack, and lengths of its segments, each a multiple of `chunks`."""
    segments = [[*one.prompt, *one.response[:-1]] for one in samples]
    for one in segments:
        one += [0] * (-len(one) % chunks)
    total, unit = sum(map(len, segments)), chunks * multiple
    if missing := -total % unit if total else unit:  # a micro-batch may have no rows
        segments.append([0] * missing)
    return _chain(segments), tuple(map(len, segments))


def _response_places(samples: list[Sample], lengths: tuple[int, ...]) -> list[int]:
    """Where the logits are, in the whole pack, that predict each response token."""
    firsts = [start + len(one.prompt) - 1 for start, one in zip(accumulate(lengths, initial=0), samples, strict=False)]
    return _chain(range(first, first + len(one.response)) for first, one in zip(firsts, samples, strict=True))


def _rows_of(held: Tensor, total: int) -> Tensor:
    """`[total]`: which of this rank's tokens stands at each place of the whole pack, -1 for none."""
    return torch.full((total,), -1).index_copy(0, held, torch.arange(len(held)))


def _chain(parts: object) -> list:
    return list(chain.from_iterable(parts))  # pyright: ignore[reportArgumentType]
