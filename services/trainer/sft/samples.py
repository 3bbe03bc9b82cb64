"""One sample of supervised fine-tuning, and a batch of them in the form in which the learner takes batches."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.schedule import Layout, make_schedule
from services.trainer.batch import Batch, MicroBatch, Row, Sample


@dataclass(frozen=True, slots=True)
class SftSample:
    """Tokens, up to the last one that is learned."""

    tokens: array[int]
    mask: bytes
    """1 for each token that is learned, else 0; the first one, which nothing predicts, never is."""

    @property
    def learned(self) -> int:
        """Number of tokens that are learned."""
        return sum(self.mask)


def make_sample(tokens: Sequence[int], mask: Sequence[int]) -> SftSample:
    """A sample of tokens and their mask. Raises ValueError if nothing of it can be learned."""
    end = len(mask) - bytes(reversed(mask)).find(1)
    if 1 not in mask[1:]:
        raise ValueError("nothing of it is learned")
    return SftSample(array("i", tokens[:end]), bytes([0, *mask[1:end]]))


@dataclass(frozen=True, slots=True)
class SftBatch:
    """A batch of one optimizer step."""

    batch: Batch
    """With the micro-batches of one rank."""
    samples: list[Sample]
    """Of all ranks, by row."""
    metrics: dict[str, float]
    """The `data/` metrics of the batch."""


def make_batch(number: int, samples: Sequence[SftSample], layout: Layout, rank: int) -> SftBatch:
    """A batch of one optimizer step whose loss is the mean over all its learned tokens.

    Args:
        number: Of the optimizer step.
        samples: Of all ranks.
        layout: Of the trainer.
        rank: The data-parallel one that gets the micro-batches.
    """
    schedule = make_schedule([len(one.tokens) for one in samples], [0] * len(samples), layout)
    learned = sum(one.learned for one in samples)
    batch = Batch(
        number=number,
        digest=batch_digest(samples),
        rows=(Row(advantage=0.0, loss_denominator=learned),) * len(samples),
        rollouts_per_step=(1,),
        micro_batches=tuple(
            MicroBatch(0, one.rows) for one in schedule.micro_batches if one.data_parallel_rank == rank
        ),
    )
    metrics = {
        "data/samples": len(samples),
        "data/learned_tokens": learned,
        "data/packing_efficiency": schedule.stats.packing_efficiency,
        "data/imbalance": schedule.stats.imbalance,
    }
    return SftBatch(batch, [_split(one) for one in samples], metrics)


def _split(sample: SftSample) -> Sample:
    """As a rollout: the response begins with the first token that is learned."""
    first = sample.mask.index(1)
    tokens = tuple(sample.tokens)
    response, no_log_probs = tokens[first:], (0.0,) * (len(tokens) - first)
    return Sample(tokens[:first], response, no_log_probs, loss_mask=tuple(sample.mask[first:]))


def batch_digest(samples: Sequence[SftSample]) -> str:
    """SHA-256, in hexadecimal, of tokens and masks in their order."""
    content = hashlib.sha256()
    for one in samples:
        content.update(len(one.tokens).to_bytes(8, "little") + one.tokens.tobytes() + one.mask)
    return content.hexdigest()
