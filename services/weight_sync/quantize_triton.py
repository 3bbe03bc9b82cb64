"""Block quantisation on CUDA: one Triton program a block, bit for bit what `quantize_reference` computes."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import Any

import torch
import triton
import triton.language as tl

from services.weight_sync.layout import BLOCK, scale_shape
from services.weight_sync.quantize import ABSMAX_FLOOR, FP8_MAX


@triton.jit
def _quantize_block(
    x_ptr,
    values_ptr,
    scales_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    block: tl.constexpr,
    fp8_max: tl.constexpr,
    floor: tl.constexpr,
):
    block_row = tl.program_id(0).to(tl.int64)
    block_column = tl.program_id(1).to(tl.int64)
    row = block_row * block + tl.arange(0, block)[:, None]
    column = block_column * block + tl.arange(0, block)[None, :]
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32)
    # The bits of magnitudes are ordered as the magnitudes are, infinities and NaN on top: a maximum that hides no NaN.
    magnitude_bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    absmax = tl.cast(tl.max(magnitude_bits), tl.float32, bitcast=True)
    # Plain `/` is an approximation on CUDA; div_rn rounds to nearest as IEEE division does.
    scale = tl.div_rn(tl.where(absmax < floor, floor, absmax), fp8_max)
    scaled = tl.div_rn(x, tl.broadcast_to(scale, (block, block)))
    clamped = tl.minimum(tl.maximum(scaled, -fp8_max), fp8_max)
    tl.store(values_ptr + row * columns + column, clamped.to(tl.float8e4nv), mask=inside)
    tl.store(scales_ptr + block_row * tl.num_programs(1) + block_column, scale)


def quantize_cuda(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize_reference`: [R, C] on CUDA, any strides, to values [R, C] and scales [B, D] on the same device."""
    rows, columns = x.shape
    grid = scale_shape(x.shape)
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(grid, dtype=torch.float32, device=x.device)
    if values.numel():
        with torch.cuda.device(x.device):
            launch: Any = _quantize_block[grid]
            launch(
                x, values, scales, rows, columns, x.stride(0), x.stride(1), BLOCK, FP8_MAX, ABSMAX_FLOOR, num_warps=8
            )
    return values, scales
