"""The 128-bit digest of what travels: order-independent, and additive over parts. No torch here.

Two lanes of 64 bits; each is the wrapping sum over all 64-bit words of mix(tensor key, word offset, word). The digest
of a whole is the sum of the digests of its parts, so that senders and receivers need not see the same parts.
`digest_torch` and `digest_triton` compute it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

LANE_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Digest:
    """Two lanes, each in [0, 2^64)."""

    low: int = 0
    high: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.low + other.low) & LANE_MASK, (self.high + other.high) & LANE_MASK)

    def __str__(self) -> str:
        return f"{self.high:016x}{self.low:016x}"

    @classmethod
    def parse(cls, text: str) -> Digest:
        """From 32 hexadecimal digits. Raises ValueError for anything else."""
        if len(text) != 32:
            raise ValueError(f"a digest has 32 hexadecimal digits, not {text!r}")
        return cls(int(text[16:], 16), int(text[:16], 16))


def total(digests: Iterable[Digest]) -> Digest:
    """The digest of the whole whose parts these are."""
    return sum(digests, Digest())


def tensor_key(name: str) -> int:
    """First 8 bytes of the SHA-256 of a tensor's name, little-endian."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
