"""The order in which a data set is used, over and over."""

from __future__ import annotations

import random
from functools import lru_cache


def place_at(index: int, count: int, seed: int | None) -> int:
    """The k-th use of `count` items takes item i = k % n in epoch e = k // n.

    With a seed, i is a place in the permutation that is seeded by seed + e.
    """
    epoch, position = divmod(index, count)
    return position if seed is None else _permutation(count, seed + epoch)[position]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
