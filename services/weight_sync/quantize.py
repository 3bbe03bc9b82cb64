"""Block quantisation, the one definition that every path follows bit by bit.

For each 128x128 block of a matrix in HF layout: a = max|x|; s = max(a, 1e-12) / 448 in float32;
q = e4m3fn(clamp(x / s, -448, 448)), with division and conversion rounded to nearest, ties to even. Blocks at the edge
are ragged. Shapes: R rows, C columns, B = ceil(R / 128) and D = ceil(C / 128) blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.weight_sync.layout import BLOCK, quantised_bytes, scale_shape, scales_offset

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


def quantize(x: torch.Tensor, name: str = "tensor") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix.

    Args:
        x: [R, C] float32, bfloat16 or float16, any strides.
        name: For the error.

    Returns:
        Values [R, C] float8_e4m3fn and scales [B, D] float32, both contiguous.

    Raises:
        ValueError: `x` has an element that is not finite.
    """
    data = torch.empty(quantised_bytes(x.shape), dtype=torch.uint8, device=x.device)
    quantize_into(data, [Placement(name, x, 0)])
    return values_and_scales(data, x.shape)


def quantize_into(buffer: torch.Tensor, matrices: Sequence[Placement]) -> None:
    """Quantise matrices into a buffer; padding is left alone. On CUDA it waits for the device once, for the check.

    Args:
        buffer: uint8, on the device of the matrices, at an address that is a multiple of 16.
        matrices: What goes where.

    Raises:
        ValueError: Names the first matrix with an element that is not finite.
    """
    if buffer.is_cuda:
        from services.weight_sync.quantize_triton import quantize_cuda

        finite = quantize_cuda(buffer, matrices)
    else:
        finite = [_quantize_into(buffer, matrix) for matrix in matrices]
    for matrix, is_finite in zip(matrices, finite, strict=True):
        if not is_finite:
            raise ValueError(f"{matrix.name} has elements that are not finite: it cannot be quantised")


def values_and_scales(data: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the bytes of a quantised [R, C] matrix: values [R, C] float8_e4m3fn and scales [B, D] float32."""
    values = data[: math.prod(shape)].view(torch.float8_e4m3fn)
    scales = data[scales_offset(shape) : quantised_bytes(shape)].view(torch.float32)
    return values.view(*shape), scales.view(scale_shape(shape))


def quantize_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize`, in plain torch, unchecked: the scale of a block with a NaN or an infinity is not finite."""
    rows, columns = x.shape
    blocks = _blocks(x.to(torch.float32))  # [B, 128, D, 128]
    absmax = blocks.abs().amax(dim=(1, 3))
    # A tensor, because torch turns division by a number into multiplication by its inverse on CUDA.
    scales = absmax.clamp_min(ABSMAX_FLOOR) / torch.full_like(absmax, FP8_MAX)
    scaled = blocks / scales[:, None, :, None]
    values = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return _matrix(values)[:rows, :columns].contiguous(), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values times their scales: [R, C] float8_e4m3fn and [B, D] float32 to [R, C] `dtype`; one rounding."""
    rows, columns = values.shape
    blocks = _blocks(values.to(torch.float32))
    return _matrix(blocks * scales[:, None, :, None])[:rows, :columns].to(dtype)


def _quantize_into(buffer: torch.Tensor, matrix: Placement) -> bool:
    """Whether all elements are finite: one that is not shows in its scale."""
    values, scales = quantize_reference(matrix.x)
    for out, result in zip(values_and_scales(buffer[matrix.start :], matrix.x.shape), (values, scales), strict=True):
        out.copy_(result)
    return bool(scales.isfinite().all())


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[R, C] to [B, 128, D, 128], padded with zeros, which no maximum of magnitudes sees."""
    rows, columns = x.shape
    row_blocks, column_blocks = scale_shape(x.shape)
    pad = (0, column_blocks * BLOCK - columns, 0, row_blocks * BLOCK - rows)
    padded = F.pad(x, pad) if any(pad) else x
    return padded.reshape(row_blocks, BLOCK, column_blocks, BLOCK)


def _matrix(blocks: torch.Tensor) -> torch.Tensor:
    """[B, 128, D, 128] to [B * 128, D * 128]."""
    row_blocks, _, column_blocks, _ = blocks.shape
    return blocks.reshape(row_blocks * BLOCK, column_blocks * BLOCK)
