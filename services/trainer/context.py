"""Context parallelism: how the tokens of a pack are shared by ranks.

Every segment is cut into 2c chunks for c ranks, and rank r has chunks r and 2c - 1 - r. Under a causal mask a late
chunk attends to more keys than an early one: so every rank has the same work, and the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """Neighbouring tokens of one segment; places are those in the whole pack."""

    segment: int
    """Where the segment begins, and with it the keys that the chunk attends to."""
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ContextRank:
    """One of the ranks that share the tokens of a pack."""

    rank: int = 0
    size: int = 1

    @property
    def chunks_per_segment(self) -> int:
        """The length of every segment must be a multiple of this."""
        return 2 * self.size if self.size > 1 else 1

    def chunks(self, lengths: Sequence[int]) -> list[Chunk]:
        """What this rank has of the segments of these lengths."""
        count = self.chunks_per_segment
        mine = sorted({self.rank, count - 1 - self.rank})
        starts = accumulate(lengths, initial=0)
        sizes = [(start, length // count) for start, length in zip(starts, lengths, strict=False)]
        return [Chunk(start, start + at * size, start + (at + 1) * size) for start, size in sizes for at in mine]

    def places(self, lengths: Sequence[int]) -> Tensor:
        """`[T / c]` places in the whole pack of this rank's tokens, in its order."""
        return _ranges((one.begin, one.end) for one in self.chunks(lengths))

    def key_rows(self, lengths: Sequence[int]) -> Tensor:
        """Where the keys that each chunk attends to lie in the `[T]` keys of all ranks, one rank after another."""
        gathered = torch.cat([ContextRank(rank, self.size).places(lengths) for rank in range(self.size)])
        return gathered.argsort()[_ranges((one.segment, one.end) for one in self.chunks(lengths))]


def _ranges(bounds: Iterable[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(begin, end) for begin, end in bounds])


ALONE = ContextRank()
"""A rank that has every token."""
