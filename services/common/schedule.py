"""Which rows of a batch go through the trainer together, and where: a pure function of lengths and layout.

Rows of an optimizer step are packed, the micro-batches are split until every rank can have as many, and then dealt to
the ranks. No row is cut, dropped or moved to another optimizer step. Every row carries its own loss denominator, so a
schedule decides how fast a step is and not what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from services.common.packing import Bins, first_fit, round_up
from services.common.partition import partition


@dataclass(frozen=True, slots=True)
class Layout:
    """What the trainer says of itself."""

    data_parallel_size: int
    max_tokens_per_micro_batch: int
    """On one GPU."""
    context_parallel_size: int = 1
    """GPUs that share the tokens of a micro-batch."""
    micro_batch_multiple: int = 1
    """Divides the number of micro-batches that a rank has in an optimizer step."""
    balance_data: bool = False
    """Give the ranks equal work instead of every n-th micro-batch."""
    flops_per_token: float = 0.0
    flops_per_token_squared: float = 0.0

    @property
    def capacity(self) -> int:
        """Tokens that one micro-batch holds."""
        return self.max_tokens_per_micro_batch * self.context_parallel_size

    def work(self, tokens: int) -> float:
        """Estimated cost of one sample, in FLOPs; in tokens where the trainer named no FLOPs."""
        if not (self.flops_per_token or self.flops_per_token_squared):
            return float(tokens)
        return (self.flops_per_token + self.flops_per_token_squared * tokens) * tokens


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Rows that share one forward and backward pass on one data-parallel rank."""

    optimizer_step: int
    data_parallel_rank: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduleStats:
    """How well a schedule uses the trainer."""

    packing_efficiency: float
    """Tokens over what the micro-batches could hold, in (0, 1]; a longer row fills its own."""
    imbalance: float
    """Work of the most loaded rank over the mean of the ranks, averaged over optimizer steps; 1 is perfect."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Micro-batches by optimizer step and rank, in the order in which the rank runs them."""

    micro_batches: tuple[MicroBatchPlan, ...]
    stats: ScheduleStats


def make_schedule(lengths: Sequence[int], optimizer_steps: Sequence[int], layout: Layout) -> Schedule:
    """Pack the rows of each optimizer step into micro-batches, as many on every rank.

    Args:
        lengths: Tokens of each row, prompt and response, at least 1; at least one row.
        optimizer_steps: Optimizer step of each row.
        layout: Of the trainer.
    """
    rows_of: dict[int, list[int]] = {}
    for row, step in enumerate(optimizer_steps):
        rows_of.setdefault(step, []).append(row)
    work = [layout.work(length) for length in lengths]
    plans: list[MicroBatchPlan] = []
    imbalances: list[float] = []
    for step, rows in sorted(rows_of.items()):
        ranks = _deal(_pack(rows, lengths, layout), work, layout)
        plans += [MicroBatchPlan(step, rank, tuple(one)) for rank, dealt in enumerate(ranks) for one in dealt]
        imbalances.append(_imbalance(ranks, work))
    filled = sum(min(length, layout.capacity) for length in lengths)
    stats = ScheduleStats(filled / (len(plans) * layout.capacity), fmean(imbalances))
    return Schedule(tuple(plans), stats)


def _pack(rows: Sequence[int], lengths: Sequence[int], layout: Layout) -> Bins:
    bins = first_fit(rows, lengths, layout.capacity)
    return round_up(bins, lengths, layout.data_parallel_size * layout.micro_batch_multiple)


def _deal(bins: Bins, work: Sequence[float], layout: Layout) -> list[Bins]:
    """The micro-batches of each rank: every n-th, or, balanced, those of equal work, the heaviest first.

    Ranks that go from heavy to light also do similar work at the same time: none waits where they exchange tokens.
    """
    ranks = layout.data_parallel_size
    if not layout.balance_data:
        return [bins[rank::ranks] for rank in range(ranks)]
    loads = [_load(one, work) for one in bins]
    return [[bins[at] for at in sorted(part, key=lambda one: -loads[one])] for part in partition(loads, ranks)]


def _load(rows: Sequence[int], work: Sequence[float]) -> float:
    return sum(work[row] for row in rows)


def _imbalance(ranks: Sequence[Bins], work: Sequence[float]) -> float:
    loads = [sum(_load(one, work) for one in dealt) for dealt in ranks]
    return max(loads) * len(loads) / sum(loads)
