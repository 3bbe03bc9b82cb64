"""Which rows of a batch go through the trainer together: a pure function of lengths and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Rows that share one forward and backward pass on one data-parallel rank."""

    optimizer_step: int
    data_parallel_rank: int
    rows: list[int]


def make_schedule(
    lengths: Sequence[int], optimizer_steps: Sequence[int], data_parallel_size: int, max_tokens: int
) -> list[MicroBatchPlan]:
    """Pack the rows of each optimizer step into micro-batches, as many on every rank.

    Args:
        lengths: Tokens of each row, prompt and response.
        optimizer_steps: Optimizer step of each row.
        data_parallel_size: Ranks.
        max_tokens: Limit of one micro-batch; a longer row goes alone.
    """
    plans = []
    for step in sorted(set(optimizer_steps)):
        rows = [row for row, own in enumerate(optimizer_steps) if own == step]
        bins = _round_up(_first_fit(rows, lengths, max_tokens), lengths, data_parallel_size)
        plans += [MicroBatchPlan(step, index % data_parallel_size, one) for index, one in enumerate(bins)]
    return plans


def _first_fit(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in rows:
        fit = next((at for at, free in enumerate(room) if free >= lengths[row]), None)
        if fit is None:
            bins.append([row])
            room.append(max_tokens - lengths[row])
        else:
            bins[fit].append(row)
            room[fit] -= lengths[row]
    return bins


def _round_up(bins: list[list[int]], lengths: Sequence[int], multiple: int) -> list[list[int]]:
    """Split the heaviest bins in two until their number is a multiple; where nothing can be split, add empty ones."""
    while len(bins) % multiple:
        splittable = [one for one in bins if len(one) > 1]
        if not splittable:
            return bins + [[] for _ in range(-len(bins) % multiple)]
        heaviest = max(splittable, key=lambda one: sum(lengths[row] for row in one))
        bins.remove(heaviest)
        bins += _halves(heaviest, lengths)
    return bins


def _halves(rows: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Longest first, each to the lighter half."""
    halves: tuple[list[int], list[int]] = ([], [])
    weights = [0, 0]
    for row in sorted(rows, key=lambda one: -lengths[one]):
        light = weights.index(min(weights))
        halves[light].append(row)
        weights[light] += lengths[row]
    return [sorted(half) for half in halves]
