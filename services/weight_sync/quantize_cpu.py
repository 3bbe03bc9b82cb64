"""Quantisation on CPU, bit for bit what `quantize_reference` and `dequantize_reference` compute, many times as fast.

Compiled by numba at the first use and kept beside this file. The loops over the elements of a block are written so that
they become vector instructions: 32-bit integers throughout, no branch, blocks as slices of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from services.weight_sync.layout import Scaling
from services.weight_sync.vllm_cpu_fixes import let_vllm_start_beside_numba

let_vllm_start_beside_numba()

compiled: Callable[..., Any] = njit(error_model="numpy", nogil=True, cache=True)
u8, u16, u32, i32, f32 = np.uint8, np.uint16, np.uint32, np.int32, np.float32

FLOOR, FP8_MAX = f32(1e-12), f32(448)
CODE_MAX = u32(0x7E)
"""Of 448; 0x7f is NaN."""
NORMAL = u32(121 << 23)
"""Bits of 2**-6, the smallest normal e4m3."""
SUBNORMAL_UNIT = f32(1 << 14)
"""Added to a float32, it leaves a multiple of 2**-9, the unit of e4m3's subnormals, in the last bits."""
SUBNORMAL_BITS = SUBNORMAL_UNIT.view(u32)
FIRST_NORMAL = u32(8)
"""Code of 2**-6."""
SMALLEST_NORMAL = f32(2.0**-6)
BIASES = u32(120 << 23)
"""By how much the exponent of a float32, whose bias is 127, is above that of an e4m3, whose bias is 7."""


def quantize_cpu(
    x: torch.Tensor, scaling: Scaling, values: torch.Tensor, scales: torch.Tensor, largest: int = 0
) -> bool:
    """Quantise a matrix.

    Args:
        x: [R, C] float32, bfloat16 or float16, any strides.
        scaling: Which elements share a scale.
        values: [R, C] float8_e4m3fn to be filled.
        scales: [B, D] float32 to be filled.
        largest: If `x` shares its scale with more than itself: what `largest_cpu` gave for all of it.

    Returns:
        Whether all elements are finite.
    """
    rows, columns = scaling.block(x.shape)
    codes = values.view(torch.uint8).numpy()
    return bool(_quantize(_source(x), rows, columns, u32(largest), scaling.ue8m0, codes, scales.numpy()))


def largest_cpu(x: torch.Tensor) -> int:
    """Bits of the largest magnitude in [R, C] as a float32; those of a NaN are above all others."""
    return int(_largest_of_rows(_source(x)))


def dequantize_cpu(values: torch.Tensor, scales: torch.Tensor, scaling: Scaling, out: torch.Tensor) -> bool:
    """Values times their scales, rounded once.

    Args:
        values: [R, C] float8_e4m3fn, any strides.
        scales: [B, D] float32.
        scaling: Which elements share a scale.
        out: [R, C] float32 or bfloat16 to be filled.

    Returns:
        Whether no value is NaN and no scale infinite or NaN.
    """
    rows, columns = scaling.block(values.shape)
    target = out.view(torch.uint16) if out.dtype == torch.bfloat16 else out
    codes = values.view(torch.int8).numpy()
    return bool(_dequantize(codes, scales.numpy(), rows, columns, target.numpy()))


def _source(x: torch.Tensor) -> Any:
    """[R, C] as numba takes it: bfloat16 as its bits, else float32."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x.to(torch.float32)).numpy()


@compiled
def _quantize(x, block_rows, block_columns, at_least, ue8m0, codes, scales):  # noqa: ANN001, ANN202  numba infers types
    finite = True
    largest = np.empty(scales.shape[1], u32)
    for b in range(scales.shape[0]):
        first, end = b * block_rows, min(x.shape[0], (b + 1) * block_rows)
        largest[:] = at_least
        for r in range(first, end):
            for d in range(scales.shape[1]):
                left, right = d * block_columns, min(x.shape[1], (d + 1) * block_columns)
                largest[d] = max(largest[d], _largest(x[r, left:right]))
        for d in range(scales.shape[1]):
            scales[b, d] = _scale(largest[d], ue8m0)
            finite = finite and scales[b, d] < np.inf
        for r in range(first, end):
            for d in range(scales.shape[1]):
                left, right = d * block_columns, min(x.shape[1], (d + 1) * block_columns)
                _encode(x[r, left:right], scales[b, d], codes[r, left:right])
    return finite


@compiled
def _dequantize(codes, scales, block_rows, block_columns, out):  # noqa: ANN001, ANN202
    finite = True
    spread = np.empty(codes.shape[1], f32)  # the scale of each column, so that a row is one loop
    for b in range(scales.shape[0]):
        for d in range(scales.shape[1]):
            spread[d * block_columns : (d + 1) * block_columns] = scales[b, d]
            finite = finite and abs(scales[b, d]) < np.inf
        for r in range(b * block_rows, min(codes.shape[0], (b + 1) * block_rows)):
            finite = _decode(codes[r], spread, out[r]) <= CODE_MAX and finite
    return finite


@compiled
def _largest_of_rows(x):  # noqa: ANN001, ANN202
    largest = u32(0)
    for r in range(x.shape[0]):
        largest = max(largest, _largest(x[r]))
    return largest


@compiled
def _largest(x):  # noqa: ANN001, ANN202
    """Bits of the largest magnitude; a NaN is the largest of all."""
    largest = _magnitude(x[0])
    for c in range(x.size):
        magnitude = _magnitude(x[c])
        largest = magnitude if magnitude > largest else largest
    return _as_float32(largest)


@compiled
def _scale(largest, ue8m0):  # noqa: ANN001, ANN202
    absmax = u32(largest).view(f32)
    scale = f32((FLOOR if absmax < FLOOR else absmax) / FP8_MAX)
    if ue8m0 and scale < np.inf:
        scale = u32((f32(scale).view(u32) + u32(0x7FFFFF)) & u32(0xFF800000)).view(f32)
    return scale


@compiled
def _encode(x, scale, codes):  # noqa: ANN001, ANN202
    for c in range(x.size):
        bits = _bits(x[c])
        quotient = f32(u32(bits & u32(0x7FFFFFFF)).view(f32) / scale)
        magnitude = quotient.view(u32)
        half = u32(u32(0x7FFFF) + u32(u32(magnitude >> u32(20)) & u32(1)))  # ties go to even
        normal = u32(u32(u32(magnitude + half) - u32(120 << 23)) >> u32(20))
        subnormal = u32(f32(quotient + SUBNORMAL_UNIT).view(u32) - SUBNORMAL_BITS)
        code = normal if magnitude >= NORMAL else subnormal
        code = code if code < CODE_MAX else CODE_MAX
        codes[c] = u8(u32(code | u32(u32(bits >> u32(24)) & u32(0x80))))


@compiled
def _decode(codes, scales, out):  # noqa: ANN001, ANN202
    """Fill `out` and say the largest code without its sign."""
    largest = u32(0)
    for c in range(codes.size):
        code = u32(i32(codes[c]))  # its sign is that of a float32
        magnitude = u32(code & u32(0x7F))
        value = u32(u32(magnitude << u32(20)) + BIASES).view(f32)
        # Those without a leading 1 would be slow as subnormal float32, so they got one, which is taken away again.
        value = f32(f32(value + value) - SMALLEST_NORMAL) if magnitude < FIRST_NORMAL else value
        product = u32(f32(value * scales[c]).view(u32) ^ u32(code & u32(0x80000000))).view(f32)
        out[c] = _rounded(product, out)
        largest = magnitude if magnitude > largest else largest
    return largest


def _magnitude(element: Any) -> Any:
    """Bits of an element without its sign, as wide as the element."""


@overload(_magnitude)
def _(element):  # noqa: ANN001, ANN202
    if isinstance(element, types.Integer):  # of a bfloat16
        return lambda element: u16(element & u16(0x7FFF))
    return lambda element: u32(f32(element).view(u32) & u32(0x7FFFFFFF))


def _bits(element: Any) -> Any:
    """Bits of an element as a float32."""


@overload(_bits)
def _(element):  # noqa: ANN001, ANN202
    if isinstance(element, types.Integer):  # of a bfloat16
        return lambda element: u32(u32(element) << u32(16))
    return lambda element: f32(element).view(u32)


def _as_float32(magnitude: Any) -> Any:
    """What `_magnitude` gave, as bits of a float32."""


@overload(_as_float32)
def _(magnitude):  # noqa: ANN001, ANN202
    if magnitude == types.uint16:
        return lambda magnitude: u32(u32(magnitude) << u32(16))
    return lambda magnitude: magnitude


def _rounded(value: Any, out: Any) -> Any:
    """A float32 as an element of `out`."""


@overload(_rounded)
def _(value, out):  # noqa: ANN001, ANN202
    if not isinstance(out.dtype, types.Integer):
        return lambda value, out: value

    def to_bfloat16(value, out):  # noqa: ANN001, ANN202
        bits = f32(value).view(u32)
        return u16(u32(u32(bits + u32(u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1)))) >> u32(16)))

    return to_bfloat16
