"""Weights a strip of rows at a time, so that memory does not depend on the size of a matrix.

Shapes: R rows and C columns of a matrix, r rows of a strip; B, D and b those of its scales. What is no matrix counts as
one: a vector as a column, anything else by its last axis.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm, prod

import torch

from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.header import Entry, FileState
from services.weight_sync.checkpoints.weights import Scale, Weight
from services.weight_sync.layout import Scaling, scale_shape
from services.weight_sync.quantize import FP8_MAX, Encoded, dequantize_into

STRIP_BYTES = 1 << 20
"""About as much as stays in a core's own cache while it is worked on."""
LARGEST_STRIP_BYTES = 8 * STRIP_BYTES
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


class Memory:
    """Room for one tensor of each dtype, used again and again: an allocator would keep several."""

    def __init__(self) -> None:
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Contiguous, with anything in it; the last one of this dtype is overwritten."""
        size = prod(shape)
        if dtype not in self._flat or self._flat[dtype].numel() < size:
            self._flat[dtype] = torch.empty(size, dtype=dtype)
        return self._flat[dtype][:size].view(shape)


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows of a matrix, as they are stored."""

    values: torch.Tensor
    """[r, C] of the dtype in the file; its memory is used again for the next strip."""
    scales: torch.Tensor | None
    """[b, D] float32, of fp8."""
    scaling: Scaling | None
    """Of the strip by its scales."""
    may_overflow: bool
    """Whether the largest value, times the largest scale of the matrix, is more than a bfloat16 holds."""
    memory: Memory

    def dequantised(self, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        """[r, C] float32 or bfloat16 of fp8, in memory that is used again for the next strip.

        Raises:
            CheckpointError: A value is NaN or a product infinite.
        """
        assert self.scales is not None and self.scaling is not None
        x = self.memory.tensor(tuple(self.values.shape), dtype)
        try:
            dequantize_into([Encoded(weight.name, self.values, self.scales, x)], self.scaling)
        except ValueError as error:
            raise CheckpointError(f"{weight.entry.file}: {error}") from None
        if self.may_overflow and not bool(x.isfinite().all()):
            raise CheckpointError(f"{weight.entry.file}: {weight.name} times its scales is not finite")
        return x


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """R and C of a tensor."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (prod(shape), 1)


def strip_rows(weights: Sequence[Weight], *blocks: Scaling) -> int:
    """Rows of a strip, about STRIP_BYTES: whole blocks of these scalings, and of the weights' own if they are small."""
    size, most = max(row_bytes(one) for one in weights), matrix_shape(weights[0].entry.shape)[0]
    block = lcm(*(min(one.rows or 1, most) for one in blocks))
    both = lcm(block, *(min(one.scale.scaling.rows or 1, most) for one in weights if one.scale))
    step = both if both * size <= LARGEST_STRIP_BYTES else block
    return step * max(1, STRIP_BYTES // max(1, step * size))


def row_bytes(weight: Weight) -> int:
    """Bytes of a row of a weight that has elements."""
    return weight.size_bytes // matrix_shape(weight.entry.shape)[0]


def strips(weight: Weight, step: int) -> Iterator[Strip]:
    """All of a weight, in order.

    Args:
        weight: A tensor with elements.
        step: Rows of a strip, from `strip_rows`.

    Raises:
        CheckpointError: The file is not the one whose header was read, or a scale is not finite.
    """
    rows, columns = matrix_shape(weight.entry.shape)
    scales = None if weight.scale is None else read_scales(weight, weight.scale)
    may_overflow = scales is not None and float(scales.abs().max()) * FP8_MAX > torch.finfo(torch.bfloat16).max
    size = row_bytes(weight)
    memory = Memory()
    with opened(weight.entry) as descriptor:
        for first in range(0, rows, step):
            end = min(rows, first + step)
            data = memory.tensor(((end - first) * size,), torch.uint8)
            read_exactly(descriptor, data, weight.entry.begin + first * size, weight.entry)
            values = data.view(TORCH_DTYPES[weight.entry.dtype]).view(end - first, columns)
            yield Strip(values, *_scales_of(scales, weight.scale, first, end), may_overflow, memory)


def read_scales(weight: Weight, scale: Scale) -> torch.Tensor:
    """[B, D] float32. Raises CheckpointError if one is not finite."""
    data = torch.empty(scale.entry.size_bytes, dtype=torch.uint8)
    with opened(scale.entry) as descriptor:
        read_exactly(descriptor, data, scale.entry.begin, scale.entry)
    shape = scale_shape(weight.entry.shape, scale.scaling)
    scales = data.view(TORCH_DTYPES[scale.entry.dtype]).to(torch.float32).view(shape)
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{scale.entry.file}: {scale.entry.name} has elements that are not finite")
    return scales


@contextmanager
def opened(entry: Entry) -> Iterator[int]:
    """A descriptor to read a tensor with. Raises CheckpointError if its file has changed since its header was read."""
    descriptor = os.open(entry.file, os.O_RDONLY)
    try:
        if FileState.of(descriptor) != entry.state:
            raise CheckpointError(f"{entry.file} has changed since its header was read")
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


def _scales_of(
    scales: torch.Tensor | None, scale: Scale | None, first: int, end: int
) -> tuple[torch.Tensor | None, Scaling | None]:
    """[b, D] of the rows from `first` to `end`, where a strip begins and ends, and what scaling they are of."""
    if scales is None or scale is None:
        return None, None
    rows = scale.scaling.rows
    if not rows:
        return scales, scale.scaling
    if first % rows == 0 or first // rows == (end - 1) // rows:
        return scales[first // rows : -(-end // rows)], scale.scaling
    return scales[torch.arange(first, end) // rows], Scaling(1, scale.scaling.columns)
