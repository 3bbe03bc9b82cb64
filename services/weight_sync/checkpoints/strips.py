"""Weights a strip of rows at a time, so that memory does not depend on the size of a matrix.

Shapes: R rows and C columns of a matrix, r rows of a strip; B, D and b those of its scales. What is no matrix counts as
one, its last axis as the columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path

import torch

from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.header import Entry
from services.weight_sync.checkpoints.weights import Scale, Weight
from services.weight_sync.layout import Scaling, scale_shape
from services.weight_sync.quantize import FP8_MAX, dequantize

STRIP_BYTES = 1 << 20
"""About as much as stays in a core's own cache while it is worked on."""
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows of a matrix, as they are stored."""

    values: torch.Tensor
    """[r, C] of the dtype in the file; its memory is used again for the next strip."""
    scales: torch.Tensor | None
    """[b, D] float32, of fp8."""
    may_overflow: bool
    """Whether the largest value, times the largest scale of the matrix, is more than a bfloat16 holds."""

    def dequantised(self, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        """[r, C] float32 or bfloat16 of fp8. Raises CheckpointError if a value is NaN or a product infinite."""
        assert weight.scale is not None and self.scales is not None
        try:
            x = dequantize(self.values, self.scales, dtype, weight.scale.scaling, weight.name)
        except ValueError as error:
            raise CheckpointError(f"{weight.entry.file}: {error}") from None
        if self.may_overflow and not bool(x.isfinite().all()):
            raise CheckpointError(f"{weight.entry.file}: {weight.name} times its scales is not finite")
        return x


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """R and C of a tensor."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def strip_rows(weights: Sequence[Weight], *blocks: Scaling) -> int:
    """Rows of a strip: whole blocks of these scalings and the weights' own, and about STRIP_BYTES."""
    scalings = [*blocks, *(one.scale.scaling for one in weights if one.scale)]
    block = lcm(*(one.rows or 1 for one in scalings))
    return block * max(1, STRIP_BYTES // max(1, block * max(row_bytes(one) for one in weights)))


def row_bytes(weight: Weight) -> int:
    """Bytes of a row of a weight that has elements."""
    return weight.size_bytes // matrix_shape(weight.entry.shape)[0]


def strips(weight: Weight, step: int) -> Iterator[Strip]:
    """All of a weight, in order.

    Args:
        weight: A tensor with elements.
        step: Rows of a strip, whole blocks of the weight's scaling: see `strip_rows`.

    Raises:
        CheckpointError: The file is shorter than its header says, or a scale is not finite.
    """
    rows, columns = matrix_shape(weight.entry.shape)
    scales = None if weight.scale is None else read_scales(weight, weight.scale)
    may_overflow = scales is not None and float(scales.abs().max()) * FP8_MAX > torch.finfo(torch.bfloat16).max
    size = row_bytes(weight)
    memory = torch.empty(min(step, rows) * size, dtype=torch.uint8)
    with opened(weight.entry.file) as descriptor:
        for first in range(0, rows, step):
            end = min(rows, first + step)
            data = memory[: (end - first) * size]
            read_exactly(descriptor, data, weight.entry.begin + first * size, weight.entry)
            values = data.view(TORCH_DTYPES[weight.entry.dtype]).view(end - first, columns)
            yield Strip(values, None if scales is None else _rows_of(scales, weight.scale, first, end), may_overflow)


def read_scales(weight: Weight, scale: Scale) -> torch.Tensor:
    """[B, D] float32. Raises CheckpointError if one is not finite."""
    data = torch.empty(scale.entry.size_bytes, dtype=torch.uint8)
    with opened(scale.entry.file) as descriptor:
        read_exactly(descriptor, data, scale.entry.begin, scale.entry)
    shape = scale_shape(weight.entry.shape, scale.scaling)
    scales = data.view(TORCH_DTYPES[scale.entry.dtype]).to(torch.float32).view(shape)
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{scale.entry.file}: {scale.entry.name} has elements that are not finite")
    return scales


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """A descriptor to read a file with."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, data: torch.Tensor, offset: int, entry: Entry) -> None:
    """Fill [bytes] uint8 from a file. Raises CheckpointError if the file ends before that."""
    memory = data.numpy().data
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if not count:
            raise CheckpointError(f"{entry.file} has become shorter while {entry.name} was read")
        memory, offset = memory[count:], offset + count


def write_exactly(descriptor: int, tensor: torch.Tensor, offset: int) -> None:
    """Write a contiguous tensor into a file."""
    memory = tensor.view(-1).view(torch.uint8).numpy().data
    while memory:
        count = os.pwrite(descriptor, memory, offset)
        memory, offset = memory[count:], offset + count


def _rows_of(scales: torch.Tensor, scale: Scale | None, first: int, end: int) -> torch.Tensor:
    """[b, D] of the rows from `first` to `end`, where a strip begins and ends."""
    assert scale is not None
    rows = scale.scaling.rows
    return scales[first // rows : -(-end // rows)] if rows else scales
