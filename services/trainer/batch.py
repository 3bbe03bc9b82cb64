"""A batch as the trainer sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """What the seal of a batch fixed about one sample."""

    advantage: float
    """Group-normalised reward, for every response token."""
    loss_denominator: int
    """Loss-mask sum over all samples of the rollout, at least 1."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through one forward and backward pass."""

    optimizer_step: int
    rows: tuple[int, ...]
    """Indices into the rows of the batch, in packing order."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of one sample; the last three are as long as each other."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    loss_mask: tuple[int, ...]


Samples = Mapping[int, Sample] | Sequence[Sample]
"""By row: all of a batch, or those that a rank needs."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One sealed batch without its tokens."""

    number: int
    digest: str
    rows: tuple[Row, ...]
    rollouts_per_step: tuple[int, ...]
    """Rollouts that each optimizer step averages over."""
    micro_batches: tuple[MicroBatch, ...]
    """Of one data-parallel rank."""

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.rollouts_per_step)


def check_tokens(batch: Batch, samples: Samples, vocabulary: int) -> None:
    """Raise ValueError for a token that has no embedding, before CUDA meets it, which would end the process."""
    for row in (row for one in batch.micro_batches for row in one.rows):
        for token in (*samples[row].prompt, *samples[row].response):
            if not 0 <= token < vocabulary:
                raise ValueError(f"sample of row {row}: token {token} is outside the vocabulary of {vocabulary}")
