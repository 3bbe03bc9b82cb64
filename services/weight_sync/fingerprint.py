"""Computes digests with torch: the same operations on CPU and GPU, in int64 arithmetic that wraps.

Lane i mixes a word w at word offset o of the tensor with key k by the splitmix64 finaliser (Steele, Lea and Flood,
OOPSLA 2014) of k + o * STEP[i] + w * SPREAD[i].
"""

from __future__ import annotations

import torch

from services.weight_sync.digest import LANE_MASK, Digest, tensor_key, total
from services.weight_sync.layout import offsets, padded
from services.weight_sync.records import WireBucket

STEP = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""Odd, so that offsets of one tensor never meet; the golden ratio, and a prime of xxHash."""
SPREAD = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Odd, so that words of one offset never meet; taken from the mixers of Pelle Evensen and wyhash."""
FINALISER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
CHUNK_WORDS = 1 << 16
"""Half a megabyte of int64: stays in the second-level cache."""


def digest_bucket(bucket: WireBucket, buffer: torch.Tensor) -> Digest:
    """Digest of an encoded bucket.

    Args:
        bucket: Its layout.
        buffer: [bucket.wire_bytes] uint8, padding zero.
    """
    parts = ((t, buffer[start : start + padded(t.wire_bytes)]) for t, start in offsets(bucket))
    return total(digest_bytes(tensor.name, data) for tensor, data in parts)


def digest_bytes(name: str, data: torch.Tensor, first_word: int = 0) -> Digest:
    """Digest of a run of bytes of one tensor.

    Args:
        name: HF name of the tensor.
        data: uint8, a multiple of 4 bytes, little-endian words.
        first_word: Offset of the run in the tensor, in words.
    """
    words = data.view(torch.int32)
    key = tensor_key(name)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, len(words), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS].to(torch.int64) & 0xFFFFFFFF
        first = first_word + start
        places = torch.arange(first, first + len(chunk), dtype=torch.int64, device=data.device)
        for lane in range(2):
            sums[lane] += _mix(places * _signed(STEP[lane]) + chunk * _signed(SPREAD[lane]) + _signed(key)).sum()
    low, high = sums.tolist()
    return Digest(low & LANE_MASK, high & LANE_MASK)


def _mix(z: torch.Tensor) -> torch.Tensor:
    for shift, factor in FINALISER:
        z = (z ^ _shift_right(z, shift)) * _signed(factor)
    return z ^ _shift_right(z, LAST_SHIFT)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch shifts in copies of the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value
