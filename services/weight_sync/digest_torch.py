"""Computes digests with torch, in int64 arithmetic that wraps; on CUDA a Triton kernel computes the same.

A lane is NH, the universal hash of UMAC (Black, Halevi, Krawczyk, Krovetz and Rogaway, CRYPTO 1999): the sum of
(low half of a word + one key mod 2^32) * (high half + another mod 2^32) mod 2^64, with keys for each word. Under
independent random keys any change of the words goes unseen with a probability of 2^-32 in a lane, so of 2^-64 in both.
Here a word at position p of stripe s, which is `STRIPE_WORDS` long, has the products of random numbers of p and odd
ones of s and its tensor as keys, mod 2^32; were they sums of the two, some exchanges of words would cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from services.weight_sync.digest import LANE_MASK, Digest, tensor_key, total
from services.weight_sync.layout import offsets, padded
from services.weight_sync.records import WireBucket

STRIPE_WORDS = 1024
SEEDS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Of the numbers of positions in either lane; taken from the mixers of Pelle Evensen and wyhash."""
STEP = 0x9E3779B97F4A7C15
"""Odd, so that numbers of one sequence never meet; the golden ratio."""
MIXER = 0xDABA0B6EB09322E3
ODD = 0x0000000100000001
LOW_HALF = 0xFFFFFFFF
WORD_BYTES = 8
CHUNK_STRIPES = 64
"""Half a megabyte: stays in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Run:
    """The words of one tensor in a bucket."""

    key: int
    """`tensor_key`, in [0, 2^64)."""
    first_word: int
    """From the start of the bucket."""
    words: int


def digest_bucket(bucket: WireBucket, buffer: torch.Tensor) -> Digest:
    """Digest of an encoded bucket.

    Args:
        bucket: Its layout.
        buffer: [bucket.wire_bytes] uint8, padding zero, on any device; on CUDA at an address that is a multiple of 16.
    """
    if buffer.is_cuda:
        from services.weight_sync.digest_triton import digest_cuda

        return digest_cuda(bucket, buffer)
    parts = ((t, buffer[start : start + padded(t.wire_bytes)]) for t, start in offsets(bucket))
    return total(digest_bytes(tensor.name, data) for tensor, data in parts)


def runs(bucket: WireBucket) -> list[Run]:
    """The words of each tensor of a bucket, padding included."""
    return [
        Run(tensor_key(tensor.name), start // WORD_BYTES, padded(tensor.wire_bytes) // WORD_BYTES)
        for tensor, start in offsets(bucket)
    ]


def digest_bytes(name: str, data: torch.Tensor, first_word: int = 0) -> Digest:
    """Digest of a run of bytes of one tensor, in main memory.

    Args:
        name: HF name of the tensor.
        data: uint8, a multiple of 8 bytes, little-endian words.
        first_word: Offset of the run in the tensor, in words.
    """
    words, sums = data.view(torch.int64), torch.zeros(2, dtype=torch.int64)
    positions, key = _position_numbers(), tensor_key(name)
    start = 0
    while start < len(words):
        stripe, position = divmod(first_word + start, STRIPE_WORDS)
        stripes = 0 if position else min((len(words) - start) // STRIPE_WORDS, CHUNK_STRIPES)
        size = stripes * STRIPE_WORDS or min(STRIPE_WORDS - position, len(words) - start)
        chunk = words[start : start + size].view(max(stripes, 1), -1)
        sums += _sums(chunk, positions[:, position : position + chunk.shape[1]], key, stripe)
        start += size
    low, high = sums.tolist()
    return Digest(low & LANE_MASK, high & LANE_MASK)


@cache
def _position_numbers() -> torch.Tensor:
    """[4, STRIPE_WORDS] int64 in [0, 2^32): halves of the numbers of each position, first those of the low lane."""
    mixed = [_mixed(torch.arange(STRIPE_WORDS), seed) for seed in SEEDS]
    return torch.stack([half for z in mixed for half in (z & LOW_HALF, _upper_half(z))])


def _sums(words: torch.Tensor, positions: torch.Tensor, key: int, first_stripe: int) -> torch.Tensor:
    """[2] int64: lanes of whole or partial stripes.

    Args:
        words: [stripes, words of each] int64.
        positions: [4, words of each], see `_position_numbers`.
        key: Of the tensor.
        first_stripe: Number of the first in the tensor.
    """
    stripes = _mixed(torch.arange(first_stripe, first_stripe + len(words)), key) | ODD
    one, other = (stripes & LOW_HALF)[:, None], _upper_half(stripes)[:, None]
    low, high = words & LOW_HALF, _upper_half(words)
    lanes = [
        ((low + positions[0] * one) & LOW_HALF) * ((high + positions[1] * other) & LOW_HALF),
        ((low + positions[2] * other) & LOW_HALF) * ((high + positions[3] * one) & LOW_HALF),
    ]
    return torch.stack([lane.sum() for lane in lanes])


def signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value


def _mixed(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Lea's mixer (Steele and Vigna, LXM, OOPSLA 2021) of seed + index * STEP."""
    z = index * signed(STEP) + signed(seed)
    for _ in range(2):
        z = (z ^ _upper_half(z)) * signed(MIXER)
    return z ^ _upper_half(z)


def _upper_half(z: torch.Tensor) -> torch.Tensor:
    """z >> 32 as a logical shift: torch shifts in copies of the sign."""
    return (z >> 32) & LOW_HALF
