"""Quantisation on CUDA, bit for bit what `quantize_reference` and `dequantize_reference` compute.

A launch handles up to SLOTS matrices. A program quantises a block, or some rows with a scale each; if a whole matrix
shares a scale, one launch finds the largest magnitude and the next one encodes.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from services.weight_sync.layout import ALIGNMENT_BYTES, Scaling, scale_shape, scales_offset
from services.weight_sync.quantize import ABSMAX_FLOOR, FP8_MAX, Encoded, Placement

SLOTS = 256
"""Most matrices of a launch: a program finds its own by comparing with the first programs of all, in one load."""
FLAG = 8
"""The row of a table that says whether all is finite."""
SIDES = (16, 32, 64, 128, 256)
"""Of blocks."""
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
def _scale(largest, fp8_max: tl.constexpr, floor: tl.constexpr, ue8m0: tl.constexpr):
    """Scales from the largest magnitudes, float32; those of a NaN or an infinity are not below infinity."""
    # Plain `/` is an approximation on CUDA; div_rn rounds to nearest as IEEE division does.
    scale = tl.div_rn(tl.where(largest < floor, floor, largest), fp8_max)
    if ue8m0:
        up = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), up, scale)
    return scale


@triton.jit
def _find_matrix(table_ptr, program, slots: tl.constexpr):
    """The column of a table for the matrix that a program belongs to, and the number of the program within it."""
    firsts = tl.load(table_ptr + tl.arange(0, slots))
    matrix = table_ptr + tl.sum((firsts <= program).to(tl.int32), 0) - 1
    return matrix, program - tl.load(matrix).to(tl.int32)


@triton.jit
def _quantize_blocks(
    table_ptr,
    buffer_ptr,
    element: tl.constexpr,
    wide: tl.constexpr,
    slots: tl.constexpr,
    fp8_max: tl.constexpr,
    floor: tl.constexpr,
    ue8m0: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    """A program quantises one block."""
    matrix, index = _find_matrix(table_ptr, tl.program_id(0), slots)
    x_ptr = tl.load(matrix + slots).to(tl.pointer_type(element))
    row_stride = tl.load(matrix + 2 * slots)
    column_stride = tl.load(matrix + 3 * slots)
    rows = tl.load(matrix + 4 * slots).to(tl.int32)
    columns = tl.load(matrix + 5 * slots).to(tl.int32)
    values_ptr = (buffer_ptr + tl.multiple_of(tl.load(matrix + 6 * slots), 16)).to(tl.pointer_type(tl.float8e4nv))
    scales_ptr = (buffer_ptr + tl.load(matrix + 7 * slots)).to(tl.pointer_type(tl.float32))
    if wide:  # said so that 16 bytes are loaded and stored at once
        row_stride, column_stride, columns = tl.multiple_of(row_stride, 16), 1, tl.multiple_of(columns, 16)
    column_blocks = tl.cdiv(columns, block_columns)
    column = index % column_blocks * block_columns + tl.arange(0, block_columns)[None, :]
    row = index // column_blocks * block_rows + tl.arange(0, block_rows)[:, None]
    inside = (row < rows) & (column < columns)
    place = x_ptr + row * row_stride + column.to(tl.int64) * column_stride
    if wide:
        place = tl.multiple_of(place, [1, 16])
    x = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
    largest = tl.reduce(_magnitude_bits(x), None, _larger)
    scale = _scale(largest.to(x.dtype, bitcast=True).to(tl.float32), fp8_max, floor, ue8m0)
    tl.store(scales_ptr + index, scale)
    tl.store(matrix + 8 * slots, 0, mask=(scale < float("inf")) == 0)
    # No clamp: no |x| is above absmax, so quotients pass 448 by a rounding at most, and become 448.
    values = _divide(x.to(tl.float32), scale, tl.div_rn(1.0, scale)).to(tl.float8e4nv)
    tl.store(values_ptr + row.to(tl.int64) * columns + column, values, mask=inside)


@triton.jit
def _quantize_rows(
    table_ptr,
    buffer_ptr,
    element: tl.constexpr,
    wide: tl.constexpr,
    slots: tl.constexpr,
    fp8_max: tl.constexpr,
    floor: tl.constexpr,
    ue8m0: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    shared: tl.constexpr,
    encode: tl.constexpr,
):
    """A program works on `tile_rows` whole rows.

    With a scale for each row it does everything. With one that the matrix shares, one launch without `encode` finds the
    bits of the largest magnitude, row 9 of the table, and the next one with `encode` uses them.
    """
    matrix, index = _find_matrix(table_ptr, tl.program_id(0), slots)
    x_ptr = tl.load(matrix + slots).to(tl.pointer_type(element))
    row_stride = tl.load(matrix + 2 * slots)
    column_stride = tl.load(matrix + 3 * slots)
    rows = tl.load(matrix + 4 * slots).to(tl.int32)
    columns = tl.load(matrix + 5 * slots).to(tl.int32)
    values_ptr = (buffer_ptr + tl.multiple_of(tl.load(matrix + 6 * slots), 16)).to(tl.pointer_type(tl.float8e4nv))
    scales_ptr = (buffer_ptr + tl.load(matrix + 7 * slots)).to(tl.pointer_type(tl.float32))
    if wide:
        row_stride, column_stride, columns = tl.multiple_of(row_stride, 16), 1, tl.multiple_of(columns, 16)
    row = index * tile_rows + tl.arange(0, tile_rows)[:, None]
    from_left = tl.arange(0, tile_columns)[None, :]
    word: tl.constexpr = tl.core.get_int_dtype(element.primitive_bitwidth, True)
    if shared and encode:
        largest = tl.full([tile_rows, 1], 0, word) + tl.load(matrix + 9 * slots).to(word)
    else:
        tile = tl.full([tile_rows, tile_columns], 0, word)
        for left in range(0, columns, tile_columns):
            column = left + from_left
            place = x_ptr + row * row_stride + column.to(tl.int64) * column_stride
            if wide:
                place = tl.multiple_of(place, [1, 16])
            tile = tl.maximum(tile, _magnitude_bits(tl.load(place, mask=(row < rows) & (column < columns), other=0.0)))
        largest = tl.reduce(tile, 1, _larger, keep_dims=True)
    if shared and not encode:
        tl.atomic_max(matrix + 9 * slots, tl.reduce(largest, None, _larger).to(tl.int64))
    else:
        scale = _scale(largest.to(element, bitcast=True).to(tl.float32), fp8_max, floor, ue8m0)
        tl.store(scales_ptr + row, scale, mask=row < (tl.minimum(rows, 1) if shared else rows))
        tl.store(matrix + 8 * slots, 0, mask=tl.max((scale < float("inf")).to(tl.int32) ^ 1) > 0)
        inverse = tl.div_rn(tl.full([tile_rows, 1], 1.0, tl.float32), scale)
        for left in range(0, columns, tile_columns):
            column = left + from_left
            inside = (row < rows) & (column < columns)
            place = x_ptr + row * row_stride + column.to(tl.int64) * column_stride
            if wide:
                place = tl.multiple_of(place, [1, 16])
            x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            values = _divide(x, scale, inverse).to(tl.float8e4nv)
            tl.store(values_ptr + row.to(tl.int64) * columns + column, values, mask=inside)


@triton.jit
def _dequantize_tiles(
    table_ptr,
    element: tl.constexpr,
    wide: tl.constexpr,
    slots: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    by_row: tl.constexpr,
    shared: tl.constexpr,
):
    """A program decodes one tile: a block with a scale of its own, or rows with theirs, or a part of a whole."""
    matrix, index = _find_matrix(table_ptr, tl.program_id(0), slots)
    codes_ptr = tl.load(matrix + slots).to(tl.pointer_type(tl.uint8))
    row_stride = tl.load(matrix + 2 * slots)
    column_stride = tl.load(matrix + 3 * slots)
    rows = tl.load(matrix + 4 * slots).to(tl.int32)
    columns = tl.load(matrix + 5 * slots).to(tl.int32)
    out_ptr = tl.load(matrix + 6 * slots).to(tl.pointer_type(element))
    scales_ptr = tl.load(matrix + 7 * slots).to(tl.pointer_type(tl.float32))
    if wide:
        row_stride, column_stride, columns = tl.multiple_of(row_stride, 16), 1, tl.multiple_of(columns, 16)
    column_tiles = tl.cdiv(columns, tile_columns)
    column = index % column_tiles * tile_columns + tl.arange(0, tile_columns)[None, :]
    row = index // column_tiles * tile_rows + tl.arange(0, tile_rows)[:, None]
    inside = (row < rows) & (column < columns)
    place = codes_ptr + row * row_stride + column.to(tl.int64) * column_stride
    if wide:
        place = tl.multiple_of(place, [1, 16])
    codes = tl.load(place, mask=inside, other=0, eviction_policy="evict_first")
    if by_row:
        scale = tl.load(scales_ptr + row, mask=row < rows, other=0.0)
    else:
        scale = tl.load(scales_ptr + (0 if shared else index))
    wrong = tl.where((codes & 0x7F) == 0x7F, 1.0, 0.0) + (scale - scale)  # NaN where a scale is infinite or NaN
    tl.store(matrix + 8 * slots, 0, mask=tl.max((wrong != 0.0).to(tl.int32)) > 0)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    tl.store(out_ptr + row.to(tl.int64) * columns + column, values.to(element), mask=inside)


TILE = (128, 128)
"""Of a decoding program where blocks say nothing better."""
ROWS_TILE = (16, 512)
"""Rows of a quantising program, and columns at a time."""


def quantize_cuda(buffer: torch.Tensor, matrices: Sequence[Placement], scaling: Scaling, warps: int = 16) -> list[bool]:
    """Quantise matrices into a buffer, as `quantize_into`, in one launch (or two) for each kind of matrix.

    Args:
        buffer: uint8, at an address that is a multiple of 16.
        matrices: What goes where, on the device of the buffer.
        scaling: Which elements share a scale; the sides of a block are powers of two from 16 to 256.
        warps: Of a program; it changes only the speed.

    Returns:
        Whether all elements of each matrix are finite; waits for the device.

    Raises:
        ValueError: The blocks have other sides.
    """
    assert buffer.data_ptr() % ALIGNMENT_BYTES == 0, "the buffer does not start at a multiple of 16"
    shared, blocks = not scaling.rows, _block(scaling)
    tile = blocks or (ROWS_TILE[0], 0)

    def entry(one: Placement) -> tuple[int, ...]:
        return one.x.data_ptr(), *one.x.stride(), *one.x.shape, one.start, one.start + scales_offset(one.x.shape), 1, 0

    def launch(kind: _Kind, table: torch.Tensor, programs: int) -> None:
        constants = ELEMENTS[kind.dtype], kind.wide, SLOTS, FP8_MAX, ABSMAX_FLOOR, scaling.ue8m0
        kernel: Any = (_quantize_blocks if blocks else _quantize_rows)[(programs,)]
        if blocks:
            kernel(table, buffer, *constants, *blocks, num_warps=warps)
            return
        for encode in (False, True) if shared else (True,):
            kernel(table, buffer, *constants, *ROWS_TILE, shared, encode, num_warps=warps)

    kinds = [_kind(one.x, one.x.dtype) for one in matrices]
    return _launch_all(kinds, [entry(one) for one in matrices], tile, buffer.device, launch)


def dequantize_cuda(matrices: Sequence[Encoded], scaling: Scaling, warps: int = 16) -> list[bool]:
    """Decode matrices, as `dequantize_into`, in one launch for each kind of matrix.

    Args:
        matrices: On one CUDA device.
        scaling: Which elements share a scale; the sides of a block are powers of two from 16 to 256.
        warps: Of a program; it changes only the speed.

    Returns:
        Whether all values and scales of each matrix are finite; waits for the device.

    Raises:
        ValueError: The blocks have other sides.
    """
    shared, blocks = not scaling.rows, _block(scaling)
    tile = blocks or TILE

    def entry(one: Encoded) -> tuple[int, ...]:
        assert one.out.is_contiguous() and one.scales.is_contiguous()
        return (
            *(one.values.data_ptr(), *one.values.stride(), *one.values.shape),
            *(one.out.data_ptr(), one.scales.data_ptr(), 1, 0),
        )

    def launch(kind: _Kind, table: torch.Tensor, programs: int) -> None:
        by_row = not blocks and not shared
        kernel: Any = _dequantize_tiles[(programs,)]
        kernel(table, ELEMENTS[kind.dtype], kind.wide, SLOTS, *tile, by_row, shared, num_warps=warps)

    kinds = [_kind(one.values, one.out.dtype) for one in matrices]
    device = matrices[0].values.device if matrices else torch.device("cuda")
    return _launch_all(kinds, [entry(one) for one in matrices], tile, device, launch)


def _block(scaling: Scaling) -> tuple[int, int] | None:
    """The sides of blocks; None if rows or matrices share a scale."""
    if scaling.rows in (0, 1) and not scaling.columns:
        return None
    for side in (scaling.rows, scaling.columns):
        if side not in SIDES:
            raise ValueError(f"blocks of {scaling.rows}x{scaling.columns} are not supported on CUDA: {SIDES}")
    return scaling.rows, scaling.columns


def _launch_all(
    kinds: Sequence[_Kind],
    entries: Sequence[tuple[int, ...]],
    tile: tuple[int, int],
    device: torch.device,
    launch: Callable[[_Kind, torch.Tensor, int], None],
) -> list[bool]:
    """Launch for all matrices; the flag that each has at the end, whether it is finite."""
    groups = list(_groups(kinds))
    if not groups:
        return []
    counts = [_programs(entry[3:5], tile) for entry in entries]
    tables = torch.stack([_table([(counts[i], entries[i]) for i in indices]) for _, indices in groups]).to(device)
    with torch.cuda.device(device):
        for (kind, indices), table in zip(groups, tables, strict=True):
            if programs := sum(counts[i] for i in indices):
                launch(kind, table, programs)
    finite = dict.fromkeys(range(len(kinds)), True)
    for (_, indices), flags in zip(groups, tables[:, FLAG].tolist(), strict=True):
        finite.update(zip(indices, map(bool, flags), strict=False))
    return list(finite.values())


def _groups(kinds: Sequence[_Kind]) -> Iterator[tuple[_Kind, list[int]]]:
    """Indices of matrices that share a launch."""
    found: defaultdict[_Kind, list[int]] = defaultdict(list)
    for i, kind in enumerate(kinds):
        found[kind].append(i)
    for kind, indices in found.items():
        for start in range(0, len(indices), SLOTS):
            yield kind, indices[start : start + SLOTS]


def _kind(x: torch.Tensor, dtype: torch.dtype) -> _Kind:
    row_stride, column_stride = x.stride()
    wide = column_stride == 1 and row_stride % 16 == x.shape[1] % 16 == x.data_ptr() % ALIGNMENT_BYTES == 0
    return _Kind(dtype, wide)


def _programs(shape: Sequence[int], tile: tuple[int, int]) -> int:
    """Programs of a matrix; a tile without columns takes all of them."""
    row_tiles, column_tiles = scale_shape(shape, Scaling(*tile))
    return row_tiles * column_tiles


def _table(matrices: Sequence[tuple[int, tuple[int, ...]]]) -> torch.Tensor:
    """[10, SLOTS] int64, a column for each matrix of (programs, entry); no program reaches the others.

    First program; address, strides of rows and columns in elements, rows, columns; where values and scales are or go
    (quantising: first bytes in the buffer; else addresses); 1, which the kernel replaces by 0 where something is not
    finite; bits of the largest magnitude.
    """
    columns, first = [], 0
    for programs, entry in matrices:
        columns.append((first, *entry))
        first += programs
    table = torch.full((FLAG + 2, SLOTS), torch.iinfo(torch.int64).max)
    numbers = array("q", chain.from_iterable(columns))  # several times faster than a tensor of the list
    table[:, : len(columns)] = torch.frombuffer(numbers, dtype=torch.int64).view(-1, FLAG + 2).T
    return table
