"""Quantisation on CUDA: tables of matrices, and the launches of services/weight_sync/quantize_triton.py."""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton.language as tl

from services.weight_sync.layout import ALIGNMENT_BYTES, Scaling, scale_shape, scales_offset
from services.weight_sync.quantize import ABSMAX_FLOOR, FP8_MAX, Encoded, Placement
from services.weight_sync.quantize_triton import dequantize_tiles, quantize_blocks, quantize_pairs, quantize_rows

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


TILE = (128, 128)
"""Of a decoding program where blocks say nothing better."""
WARPS = 4
"""Of a program: few, so that others load while it computes."""
ROWS_TILE = (16, 512)
"""Rows of a quantising program, and columns at a time."""


def quantize_cuda(
    buffer: torch.Tensor, matrices: Sequence[Placement], scaling: Scaling, warps: int = WARPS
) -> list[bool]:
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
        memory = ELEMENTS[kind.dtype], kind.wide
        constants = SLOTS, FP8_MAX, ABSMAX_FLOOR, scaling.ue8m0
        if blocks and kind == _Kind(torch.bfloat16, True):
            kernel: Any = quantize_pairs[(programs,)]
            kernel(table, buffer, *constants, *blocks, num_warps=warps)
        elif blocks:
            kernel = quantize_blocks[(programs,)]
            kernel(table, buffer, *memory, *constants, *blocks, num_warps=warps)
        else:
            kernel = quantize_rows[(programs,)]
            for encode in (False, True) if shared else (True,):
                kernel(table, buffer, *memory, *constants, *ROWS_TILE, shared, encode, num_warps=warps)

    kinds = [_kind(one.x, one.x) for one in matrices]
    return _launch_all(kinds, [entry(one) for one in matrices], tile, buffer.device, launch)


def dequantize_cuda(matrices: Sequence[Encoded], scaling: Scaling, warps: int = WARPS) -> list[bool]:
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
        kernel: Any = dequantize_tiles[(programs,)]
        kernel(table, ELEMENTS[kind.dtype], kind.wide, SLOTS, *tile, by_row, shared, num_warps=warps)

    kinds = [_kind(one.values, one.out) for one in matrices]
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


def _kind(x: torch.Tensor, floats: torch.Tensor) -> _Kind:
    """Of what is read, and of the side that is not fp8."""
    row_stride, column_stride = x.stride()
    aligned = x.data_ptr() % ALIGNMENT_BYTES == floats.data_ptr() % ALIGNMENT_BYTES == 0
    return _Kind(floats.dtype, aligned and column_stride == 1 and row_stride % 16 == x.shape[1] % 16 == 0)


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
