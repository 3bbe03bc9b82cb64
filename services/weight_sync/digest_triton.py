"""The digest of a bucket on CUDA in one launch: the same 128 bits as `digest_bytes` computes with torch."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from services.weight_sync.digest import LANE_MASK, Digest
from services.weight_sync.digest_torch import MIXER, ODD, SEEDS, STEP, STRIPE_WORDS, runs, signed
from services.weight_sync.records import WireBucket

SHARE_STRIPES = 16
"""At most so many stripes of one tensor are the share of a program: thousands of programs, few atomic additions."""
TABLES = 1024
"""So many buckets are remembered, with a table of 0.03 % of their size on the device."""


@triton.jit
def _mix(z, mixer: tl.constexpr):
    """As `digest_torch` does it, on uint64: there `>>` is a logical shift."""
    z = (z ^ (z >> 32)) * mixer
    z = (z ^ (z >> 32)) * mixer
    return z ^ (z >> 32)


@triton.jit
def _product(word, a, b):
    """One product of NH: the halves of the word plus their keys, mod 2^32, multiplied to 64 bits."""
    return (word.to(tl.uint32) + a).to(tl.uint64) * ((word >> 32).to(tl.uint32) + b).to(tl.uint64)


@triton.jit
def _digest_share(
    words_ptr,
    shares_ptr,
    sums_ptr,
    seeds: tl.constexpr,
    step: tl.constexpr,
    mixer: tl.constexpr,
    odd: tl.constexpr,
    stripe_words: tl.constexpr,
):
    share = shares_ptr + tl.program_id(0) * 4
    # A tensor's key plus step times the number of a stripe.
    counter = tl.load(share).to(tl.uint64, bitcast=True) + tl.load(share + 1).to(tl.uint64, bitcast=True) * step
    # Tensors are whole 16 bytes, so both are even: said so that two words are loaded at once.
    start = tl.multiple_of(tl.load(share + 2), 2)
    words = tl.multiple_of(tl.load(share + 3).to(tl.int32), 2)
    position = tl.arange(0, stripe_words)
    numbers = _mix(position.to(tl.uint64) * step + seeds[0], mixer)
    p0, p1 = numbers.to(tl.uint32), (numbers >> 32).to(tl.uint32)
    numbers = _mix(position.to(tl.uint64) * step + seeds[1], mixer)
    p2, p3 = numbers.to(tl.uint32), (numbers >> 32).to(tl.uint32)
    low, high = tl.zeros([stripe_words], tl.uint64), tl.zeros([stripe_words], tl.uint64)
    for first in range(0, words, stripe_words):
        stripe = _mix(counter, mixer) | odd
        one, other = stripe.to(tl.uint32), (stripe >> 32).to(tl.uint32)
        counter += step
        inside = first + position < words
        word = tl.load(words_ptr + start + first + position, mask=inside, other=0).to(tl.uint64, bitcast=True)
        low += tl.where(inside, _product(word, p0 * one, p1 * other), 0)
        high += tl.where(inside, _product(word, p2 * other, p3 * one), 0)
    tl.atomic_add(sums_ptr, tl.sum(low).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums_ptr + 1, tl.sum(high).to(tl.int64, bitcast=True), sem="relaxed")


def digest_cuda(bucket: WireBucket, buffer: torch.Tensor, warps: int = 8) -> Digest:
    """Digest of an encoded bucket on CUDA, on the current stream; waits for the result.

    Args:
        bucket: Its layout.
        buffer: [bucket.wire_bytes] uint8, at an address that is a multiple of 16.
        warps: Of a program; they change only the speed.
    """
    sums, shares = torch.zeros(2, dtype=torch.int64, device=buffer.device), _shares(bucket, buffer.device)
    if len(shares):
        with torch.cuda.device(buffer.device):
            kernel: Any = _digest_share[(len(shares),)]
            constants = SEEDS, STEP, MIXER, ODD, STRIPE_WORDS
            kernel(buffer.view(torch.int64), shares, sums, *constants, num_warps=warps)
    low, high = sums.tolist()
    return Digest(low & LANE_MASK, high & LANE_MASK)


@lru_cache(TABLES)
def _shares(bucket: WireBucket, device: torch.device) -> torch.Tensor:
    """[programs, 4] int64: key of the tensor, number of the first stripe in it, first word in the buffer, words."""
    rows = [(signed(run.key), run.first_word, run.words) for run in runs(bucket)]
    keys, starts, words = torch.tensor(rows, dtype=torch.int64).view(-1, 3).T
    programs = -(-words // (SHARE_STRIPES * STRIPE_WORDS))
    run = torch.repeat_interleave(programs)
    stripe = (torch.arange(len(run)) - (programs.cumsum(0) - programs)[run]) * SHARE_STRIPES
    place = stripe * STRIPE_WORDS
    rest = (words[run] - place).clamp_max(SHARE_STRIPES * STRIPE_WORDS)
    return torch.stack([keys[run], stripe, starts[run] + place, rest], 1).to(device)
