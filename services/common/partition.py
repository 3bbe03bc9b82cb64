"""Splits weighted items into parts of equally many items and nearly equal weight.

The largest differencing method of Karmarkar and Karp ("The differencing method of set partitioning", 1982) for k parts,
as Korf states it ("Multi-way number partitioning", 2009): a partial solution is a tuple of k parts; the two whose parts
differ most are merged, heaviest part with lightest, until one is left. Where it begins from one item in each part
instead of one item alone, every merge keeps the parts equally large.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Part = tuple[float, list[int]]
"""Weight, and items."""


def partition(weights: Sequence[float], parts: int) -> list[list[int]]:
    """Assign every item to one part.

    Args:
        weights: Of each item, finite and not negative; their number is a multiple of `parts`.
        parts: At least 1.

    Returns:
        For each part the indices of its items, ascending.
    """
    assert len(weights) % parts == 0, f"{len(weights)} items do not fill {parts} parts equally"
    order = sorted(range(len(weights)), key=lambda item: -weights[item])
    heap = [
        _entry(begin, [(weights[item], [item]) for item in order[begin : begin + parts]])
        for begin in range(0, len(order), parts)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        heapq.heappush(heap, _entry(number, _merge(first, second)))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


def _entry(number: int, solution: list[Part]) -> tuple[float, int, list[Part]]:
    """Of the heap: the widest spread comes first, and `number` decides between equals."""
    return solution[-1][0] - solution[0][0], number, solution


def _merge(first: list[Part], second: list[Part]) -> list[Part]:
    """Both run from the heaviest part to the lightest, and so does the result. Uses up the items of both."""
    merged = []
    for (a, items), (b, others) in zip(first, reversed(second), strict=True):
        longer, shorter = (items, others) if len(items) > len(others) else (others, items)
        longer += shorter  # in place: a copy for every merge is quadratic in the number of items
        merged.append((a + b, longer))
    return sorted(merged, key=lambda part: -part[0])
