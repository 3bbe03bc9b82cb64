"""Quantisation to fp8, the one definition that every path follows bit by bit.

For the elements that share a scale (layout.Scaling: a block, a row, the matrix): a = max|x|; s = max(a, 1e-12) / 448 in
float32, rounded up to a power of two for UE8M0; q = e4m3fn(clamp(x / s, -448, 448)), with division and conversion
rounded to nearest, ties to even. Shapes: R rows and C columns of a matrix in HF layout, B rows and D columns of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.weight_sync.layout import BLOCK_128, Scaling, quantised_bytes, scale_shape, scales_offset

FP8_MAX = 448.0
"""Largest finite e4m3fn."""
ABSMAX_FLOOR = 1e-12
"""Keeps the scale of a block of zeros away from 0."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A matrix to be quantised, and where to."""

    name: str
    """For the error."""
    x: torch.Tensor
    """[R, C] float32, bfloat16 or float16, any strides."""
    start: int
    """First byte of the quantised matrix in a buffer, a multiple of 16: see `values_and_scales`."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A quantised matrix, and where it is to be decoded to."""

    name: str
    """For the error."""
    values: torch.Tensor
    """[R, C] float8_e4m3fn, any strides."""
    scales: torch.Tensor
    """[B, D] float32, contiguous."""
    out: torch.Tensor
    """[R, C] float32 or bfloat16, contiguous, to be filled."""


def quantize(x: torch.Tensor, name: str = "tensor", scaling: Scaling = BLOCK_128) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix.

    Args:
        x: [R, C] float32, bfloat16 or float16, any strides.
        name: For the error.
        scaling: Which elements share a scale.

    Returns:
        Values [R, C] float8_e4m3fn and scales [B, D] float32, both contiguous.

    Raises:
        ValueError: `x` has an element that is not finite.
    """
    data = torch.empty(quantised_bytes(x.shape, scaling), dtype=torch.uint8, device=x.device)
    quantize_into(data, [Placement(name, x, 0)], scaling)
    return values_and_scales(data, x.shape, scaling)


def quantize_into(buffer: torch.Tensor, matrices: Sequence[Placement], scaling: Scaling = BLOCK_128) -> None:
    """Quantise matrices into a buffer; padding is left alone. On CUDA it waits for the device once, for the check.

    Args:
        buffer: uint8, on the device of the matrices, at an address that is a multiple of 16.
        matrices: What goes where.
        scaling: Which elements share a scale.

    Raises:
        ValueError: Names the first matrix with an element that is not finite.
    """
    if buffer.is_cuda:
        from services.weight_sync.quantize_cuda import quantize_cuda

        finite = quantize_cuda(buffer, matrices, scaling)
    else:
        from services.weight_sync.quantize_cpu import quantize_cpu  # here, because numba takes half a second to load

        finite = [
            quantize_cpu(one.x, scaling, *values_and_scales(buffer[one.start :], one.x.shape, scaling))
            for one in matrices
        ]
    for matrix, is_finite in zip(matrices, finite, strict=True):
        if not is_finite:
            raise ValueError(f"{matrix.name} has elements that are not finite: it cannot be quantised")


def values_and_scales(
    data: torch.Tensor, shape: Sequence[int], scaling: Scaling = BLOCK_128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the bytes of a quantised [R, C] matrix: values [R, C] float8_e4m3fn and scales [B, D] float32."""
    values = data[: math.prod(shape)].view(torch.float8_e4m3fn)
    scales = data[scales_offset(shape) : quantised_bytes(shape, scaling)].view(torch.float32)
    return values.view(*shape), scales.view(scale_shape(shape, scaling))


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    scaling: Scaling = BLOCK_128,
    name: str = "tensor",
) -> torch.Tensor:
    """Values times their scales.

    Args:
        values: [R, C] float8_e4m3fn, any strides.
        scales: [B, D] float32, contiguous.
        dtype: float32 or bfloat16, of the result.
        scaling: Which elements share a scale.
        name: For the error.

    Returns:
        [R, C] `dtype`: products in float32, rounded once.

    Raises:
        ValueError: A value is NaN, or a scale not finite.
    """
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    dequantize_into([Encoded(name, values, scales, out)], scaling)
    return out


def dequantize_into(matrices: Sequence[Encoded], scaling: Scaling = BLOCK_128) -> None:
    """Decode matrices, all on one device. On CUDA it waits for the device once, for the check.

    Raises:
        ValueError: Names the first matrix with a value that is NaN, or a scale that is not finite.
    """
    for one in matrices:
        if tuple(one.scales.shape) != scale_shape(one.values.shape, scaling):
            raise ValueError(f"{one.name} has scales of shape {tuple(one.scales.shape)}, which do not fit its own")
    if matrices and matrices[0].values.is_cuda:
        from services.weight_sync.quantize_cuda import dequantize_cuda

        finite = dequantize_cuda(matrices, scaling)
    else:
        from services.weight_sync.quantize_cpu import dequantize_cpu

        finite = [dequantize_cpu(one.values, one.scales, scaling, one.out) for one in matrices]
    for matrix, is_finite in zip(matrices, finite, strict=True):
        if not is_finite:
            raise ValueError(f"{matrix.name} has fp8 values or scales that are not finite")


def quantize_reference(x: torch.Tensor, scaling: Scaling = BLOCK_128) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize`, in plain torch, unchecked: the scale of a block with a NaN or an infinity is not finite."""
    rows, columns = x.shape
    blocks = _blocks(x.to(torch.float32), scaling)  # [B, block rows, D, block columns]
    absmax = blocks.abs().amax(dim=(1, 3))
    # A tensor, because torch turns division by a number into multiplication by its inverse on CUDA.
    scales = absmax.clamp_min(ABSMAX_FLOOR) / torch.full_like(absmax, FP8_MAX)
    scales = _power_of_two(scales) if scaling.ue8m0 else scales
    scaled = blocks / scales[:, None, :, None]
    values = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return _matrix(values)[:rows, :columns].contiguous(), scales


def dequantize_reference(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, scaling: Scaling = BLOCK_128
) -> torch.Tensor:
    """As `dequantize`, in plain torch, unchecked."""
    rows, columns = values.shape
    blocks = _blocks(values.to(torch.float32), scaling)
    return _matrix(blocks * scales[:, None, :, None])[:rows, :columns].to(dtype)


def _power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """Each scale rounded up to a power of two, by its bits; what is not finite stays."""
    mantissa = (1 << 23) - 1
    rounded = ((scales.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales)


def _blocks(x: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    """[R, C] to [B, block rows, D, block columns], padded with zeros, which no maximum of magnitudes sees."""
    (rows, columns), (block_rows, block_columns) = x.shape, scaling.block(x.shape)
    row_blocks, column_blocks = scale_shape(x.shape, scaling)
    pad = (0, column_blocks * block_columns - columns, 0, row_blocks * block_rows - rows)
    padded = F.pad(x, pad) if any(pad) else x
    return padded.reshape(row_blocks, block_rows, column_blocks, block_columns)


def _matrix(blocks: torch.Tensor) -> torch.Tensor:
    """[B, block rows, D, block columns] to [B * block rows, D * block columns]."""
    row_blocks, block_rows, column_blocks, block_columns = blocks.shape
    return blocks.reshape(row_blocks * block_rows, column_blocks * block_columns)
