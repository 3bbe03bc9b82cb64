"""Packs the rows of one optimizer step into micro-batches. Pure; rows are named by index, sizes are in tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Bins = list[list[int]]
"""Rows of each micro-batch, in packing order."""


def first_fit(rows: Sequence[int], lengths: Sequence[int], capacity: int) -> Bins:
    """Each row, in the order given, into the first micro-batch with room for it, or a new one; longer rows alone.

    `room` is a tree of maxima over the room in each micro-batch, so that a row takes O(log rows); the children of node
    i are 2i and 2i + 1. Micro-batches not opened yet have all their room: the first with room is open, or opened next.
    """
    leaves = 1 << len(rows).bit_length()
    room = [capacity] * (2 * leaves)
    bins: Bins = []
    for row in rows:
        length = lengths[row]
        at = leaves + len(bins) if length > capacity else _first_with_room(room, length, leaves)
        if at == leaves + len(bins):
            bins.append([])
        bins[at - leaves].append(row)
        room[at] -= length
        while at > 1:
            at //= 2
            room[at] = max(room[2 * at], room[2 * at + 1])
    return bins


def _first_with_room(room: Sequence[int], length: int, leaves: int) -> int:
    at = 1
    while at < leaves:
        at = 2 * at if room[2 * at] >= length else 2 * at + 1
    return at


def round_up(bins: Bins, lengths: Sequence[int], multiple: int) -> Bins:
    """Split the heaviest in two until their number is a multiple; where nothing can be split, add empty ones."""
    bins = list(bins)
    heaviest = [_by_weight(at, one, lengths) for at, one in enumerate(bins) if len(one) > 1]
    heapq.heapify(heaviest)
    while len(bins) % multiple and heaviest:
        _, at = heapq.heappop(heaviest)
        bins[at], other = _halves(bins[at], lengths)
        bins.append(other)
        for place in (at, len(bins) - 1):
            if len(bins[place]) > 1:
                heapq.heappush(heaviest, _by_weight(place, bins[place], lengths))
    return bins + [[] for _ in range(-len(bins) % multiple)]


def _by_weight(at: int, rows: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    return -sum(lengths[row] for row in rows), at


def _halves(rows: Sequence[int], lengths: Sequence[int]) -> Bins:
    """Longest first, each to the lighter half."""
    halves: Bins = [[], []]
    weights = [0, 0]
    for row in sorted(rows, key=lambda one: -lengths[one]):
        light = weights.index(min(weights))
        halves[light].append(row)
        weights[light] += lengths[row]
    return [sorted(half) for half in halves]
