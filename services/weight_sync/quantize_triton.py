"""Block quantisation on CUDA, bit for bit what `quantize_reference` computes."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from services.weight_sync.layout import ALIGNMENT_BYTES, BLOCK, scale_shape, scales_offset
from services.weight_sync.quantize import ABSMAX_FLOOR, FP8_MAX, Placement

SLOTS = 256
"""Most matrices of a launch: a program finds its own by comparing with the first programs of all, in one load."""
ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class _Kind(NamedTuple):
    """What the kernel is compiled for."""

    dtype: torch.dtype
    wide: bool
    """Rows are contiguous and whole multiples of 16 bytes, as are their distances: memory is accessed in 16 bytes."""


@triton.jit
def _magnitude_bits(x):
    """Bits of |x|, ordered as the magnitudes are, infinities and NaN on top: no maximum of them hides a NaN."""
    word: tl.constexpr = tl.core.get_int_dtype(x.dtype.primitive_bitwidth, True)
    return x.to(word, bitcast=True) & ((1 << (x.dtype.primitive_bitwidth - 1)) - 1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _divide(x, divisor, inverse):
    """x / divisor, near enough to the float32 quotient to become the same e4m3 code; `inverse` is 1 / divisor, rounded.

    One correction by the remainder (Markstein, IBM Journal of R&D 34, 1990) leaves an error below 1.5 * 2**-46 times
    the power of two under the quotient. A code depends on the side of the middle between two codes on which the
    rounded quotient lies, so only quotients that near to the float32 rounding boundaries beside a middle could differ.
    Middles have 5 significant bits; hence such a quotient needs a divisor whose 24-bit significand is within 6 of a
    multiple of 2**20, and a test goes through all of those. Nothing underflows in quotients of 2**-10 or more, and
    smaller ones become 0 either way. The excess is subtracted, not added, because that keeps the sign of a zero.
    """
    quotient = x * inverse
    excess = tl.fma(quotient, divisor, x * -1.0)
    return tl.fma(excess, inverse * -1.0, quotient)


@triton.jit
def _quantize_blocks(
    table_ptr,
    buffer_ptr,
    element: tl.constexpr,
    wide: tl.constexpr,
    slots: tl.constexpr,
    block: tl.constexpr,
    fp8_max: tl.constexpr,
    floor: tl.constexpr,
):
    program = tl.program_id(0)
    firsts = tl.load(table_ptr + tl.arange(0, slots))
    matrix = table_ptr + tl.sum((firsts <= program).to(tl.int32), 0) - 1
    index = program - tl.load(matrix).to(tl.int32)
    x_ptr = tl.load(matrix + slots).to(tl.pointer_type(element))
    row_stride = tl.load(matrix + 2 * slots)
    column_stride = tl.load(matrix + 3 * slots)
    rows = tl.load(matrix + 4 * slots).to(tl.int32)
    columns = tl.load(matrix + 5 * slots).to(tl.int32)
    values_ptr = (buffer_ptr + tl.multiple_of(tl.load(matrix + 6 * slots), 16)).to(tl.pointer_type(tl.float8e4nv))
    scales_ptr = (buffer_ptr + tl.load(matrix + 7 * slots)).to(tl.pointer_type(tl.float32))
    if wide:  # said so that 16 bytes are loaded and stored at once
        row_stride, column_stride, columns = tl.multiple_of(row_stride, 16), 1, tl.multiple_of(columns, 16)
    column_blocks = tl.cdiv(columns, block)
    column = index % column_blocks * block + tl.arange(0, block)[None, :]
    row = index // column_blocks * block + tl.arange(0, block)[:, None]
    inside = (row < rows) & (column < columns)
    place = x_ptr + row * row_stride + column.to(tl.int64) * column_stride
    if wide:
        place = tl.multiple_of(place, [1, 16])
    x = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
    largest = tl.reduce(_magnitude_bits(x), None, _larger)
    absmax = largest.to(x.dtype, bitcast=True).to(tl.float32)
    # Plain `/` is an approximation on CUDA; div_rn rounds to nearest as IEEE division does.
    scale = tl.div_rn(tl.where(absmax < floor, floor, absmax), fp8_max)
    tl.store(scales_ptr + index, scale)
    tl.store(matrix + 8 * slots, 0, mask=(scale < float("inf")) == 0)
    # No clamp: no |x| is above absmax, so quotients pass 448 by a rounding at most, and become 448.
    values = _divide(x.to(tl.float32), scale, tl.div_rn(1.0, scale)).to(tl.float8e4nv)
    tl.store(values_ptr + row.to(tl.int64) * columns + column, values, mask=inside)


def quantize_cuda(buffer: torch.Tensor, matrices: Sequence[Placement], warps: int = 16) -> list[bool]:
    """Quantise matrices into a buffer, as `quantize_into`, in one launch for each kind of matrix.

    Args:
        buffer: uint8, at an address that is a multiple of 16.
        matrices: What goes where, on the device of the buffer.
        warps: Of a program, which quantises one block; it changes only the speed.

    Returns:
        Whether all elements of each matrix are finite; waits for the device.
    """
    assert buffer.data_ptr() % ALIGNMENT_BYTES == 0, "the buffer does not start at a multiple of 16"
    launches = list(_launches(matrices))
    if not launches:
        return []
    tables = torch.stack([_table([matrices[i] for i in indices]) for _, indices in launches]).to(buffer.device)
    with torch.cuda.device(buffer.device):
        for (kind, indices), table in zip(launches, tables, strict=True):
            if blocks := sum(_block_count(matrices[i].x) for i in indices):
                kernel: Any = _quantize_blocks[(blocks,)]
                constants = ELEMENTS[kind.dtype], kind.wide, SLOTS, BLOCK, FP8_MAX, ABSMAX_FLOOR
                kernel(table, buffer, *constants, num_warps=warps)
    finite = dict.fromkeys(range(len(matrices)), True)
    for (_, indices), flags in zip(launches, tables[:, -1].tolist(), strict=True):
        finite.update(zip(indices, map(bool, flags), strict=False))
    return list(finite.values())


def _launches(matrices: Sequence[Placement]) -> Iterator[tuple[_Kind, list[int]]]:
    """Indices of matrices that share a launch."""
    kinds: defaultdict[_Kind, list[int]] = defaultdict(list)
    for i, matrix in enumerate(matrices):
        kinds[_kind(matrix.x)].append(i)
    for kind, indices in kinds.items():
        for start in range(0, len(indices), SLOTS):
            yield kind, indices[start : start + SLOTS]


def _kind(x: torch.Tensor) -> _Kind:
    row_stride, column_stride = x.stride()
    wide = column_stride == 1 and row_stride % 16 == x.shape[1] % 16 == x.data_ptr() % ALIGNMENT_BYTES == 0
    return _Kind(x.dtype, wide)


def _block_count(x: torch.Tensor) -> int:
    row_blocks, column_blocks = scale_shape(x.shape)
    return row_blocks * column_blocks


def _table(matrices: Sequence[Placement]) -> torch.Tensor:
    """[9, SLOTS] int64, a column for each matrix; no program reaches the others.

    First program; address, strides of rows and columns in elements, rows, columns; first byte of values, first byte of
    scales; 1, which the kernel replaces by 0 where a scale is not finite.
    """
    columns, first = [], 0
    for matrix in matrices:
        x, start = matrix.x, matrix.start
        columns.append((first, x.data_ptr(), *x.stride(), *x.shape, start, start + scales_offset(x.shape), 1))
        first += _block_count(x)
    table = torch.full((9, SLOTS), torch.iinfo(torch.int64).max)
    numbers = array("q", chain.from_iterable(columns))  # several times faster than a tensor of the list
    table[:, : len(columns)] = torch.frombuffer(numbers, dtype=torch.int64).view(-1, 9).T
    return table
