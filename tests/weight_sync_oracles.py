"""Oracles for weight_sync tests, in numpy and exact integers; they import nothing from `services`."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np

E4M3_MAGNITUDES = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
)
"""Value of each code 0x00 to 0x7e: 3 bits of mantissa, 4 of exponent with bias 7, subnormals; 0x7f is NaN."""


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """Nearest code of each float, in magnitude at most 448; ties go to the even code."""
    magnitudes = np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(E4M3_MAGNITUDES, magnitudes), 1, len(E4M3_MAGNITUDES) - 1)
    below = above - 1
    middle = (E4M3_MAGNITUDES[below] + E4M3_MAGNITUDES[above]) / 2  # exact in float64
    up = (magnitudes > middle) | ((magnitudes == middle) & (above % 2 == 0))
    codes = np.where(up, above, below).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << 7)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    """The float64 of each code."""
    return np.where(codes & 0x80, -1.0, 1.0) * E4M3_MAGNITUDES[codes & 0x7F]


def quantize(x: np.ndarray, block: tuple[int, int] = (128, 128), ue8m0: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """[R, C] float32 to codes [R, C] uint8 and scales [B, D] float32, a block (rows, columns) at a time."""
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty([-(-size // side) for size, side in zip(x.shape, block, strict=True)], np.float32)
    for i, j in np.ndindex(*scales.shape):
        inside = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        scale = np.float32(max(np.abs(x[inside]).max(), np.float32(1e-12))) / np.float32(448)
        scale = np.float32(2.0 ** math.ceil(math.log2(scale))) if ue8m0 else scale
        scales[i, j] = scale
        codes[inside] = e4m3_codes(np.clip(x[inside] / scale, np.float32(-448), np.float32(448)))
    return codes, scales


def dequantize(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int] = (128, 128)) -> np.ndarray:
    """[R, C] float32."""
    rows, columns = codes.shape
    spread = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)[:rows, :columns]
    with np.errstate(over="ignore"):  # a scale of UE8M0 may be twice what the largest value needs
        return (e4m3_values(codes).astype(np.float32) * spread).astype(np.float32)


def digest(tensors: dict[str, bytes]) -> str:
    """128-bit digest of tensors given as bytes, whole 64-bit words, little-endian."""
    half, mask = (1 << 32) - 1, (1 << 64) - 1
    lanes = [0, 0]
    for name, data in tensors.items():
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        for offset, word in enumerate(np.frombuffer(data, "<u8").tolist()):
            stripe, position = divmod(offset, 1024)
            of_stripe = _mixed(key, stripe) & half | 1, _mixed(key, stripe) >> 32 | 1
            for lane, seed in enumerate((0xD6E8FEB86659FD93, 0xA0761D6478BD642F)):
                of_position = _mixed(seed, position)
                low_key, high_key = (of_position & half) * of_stripe[lane], (of_position >> 32) * of_stripe[1 - lane]
                product = (((word & half) + low_key) & half) * (((word >> 32) + high_key) & half)
                lanes[lane] = (lanes[lane] + product) & mask
    return f"{lanes[1]:016x}{lanes[0]:016x}"


def _mixed(seed: int, index: int) -> int:
    """Lea's mixer of the index-th number of a sequence."""
    mask = (1 << 64) - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 32)) * 0xDABA0B6EB09322E3) & mask
    z = ((z ^ (z >> 32)) * 0xDABA0B6EB09322E3) & mask
    return z ^ (z >> 32)


def to_float32(x: Fraction) -> Fraction:
    """The nearest float32, ties to even, as long as it is normal; how a fused multiply-add rounds its exact result."""
    if not x:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()  # of |x|, or one too many
    unit = Fraction(2) ** (exponent - 23 - (abs(x) < Fraction(2) ** exponent))
    return round(x / unit) * unit
