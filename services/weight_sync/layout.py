"""Sizes and offsets on the wire, as pure functions; sender, receiver and plan share them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.weight_sync.records import WireBucket, WireFormat, WireTensor


@dataclass(frozen=True, slots=True)
class Scaling:
    """Which elements of a matrix share a scale: blocks of this size, ragged ones at the right and bottom edge."""

    rows: int
    """Rows of a block; 0: all."""
    columns: int
    """Columns of a block; 0: all."""
    ue8m0: bool = False
    """Scales are rounded up to powers of two."""

    def block(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a block of a matrix of this shape."""
        return self.rows or max(1, shape[0]), self.columns or max(1, shape[1])


BLOCK_128 = Scaling(128, 128)
CHANNEL = Scaling(1, 0)
TENSOR = Scaling(0, 0)
ALIGNMENT_BYTES = 16
"""Every tensor of a bucket, and its scales, start at a multiple of it, so that a view of any dtype is aligned."""
SCALE_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What a trainer may hold; block quantisation applies to each of them."""


def padded(size_bytes: int) -> int:
    """Size rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def scale_shape(shape: Sequence[int], scaling: Scaling = BLOCK_128) -> tuple[int, int]:
    """Shape of the scales of a matrix: one for each block, ragged ones included."""
    (rows, columns), (block_rows, block_columns) = shape, scaling.block(shape)
    return -(-rows // block_rows), -(-columns // block_columns)


def plain_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor as its dtype says."""
    return math.prod(shape) * DTYPE_BYTES[dtype]


def scales_offset(shape: Sequence[int]) -> int:
    """First byte of the scales of a quantised matrix: its values come before, padded."""
    return padded(math.prod(shape))


def quantised_bytes(shape: Sequence[int], scaling: Scaling = BLOCK_128) -> int:
    """Bytes of a quantised matrix: values, padded, and scales."""
    return scales_offset(shape) + math.prod(scale_shape(shape, scaling)) * SCALE_BYTES


def encoded_bytes(shape: Sequence[int], dtype: str, form: WireFormat) -> int:
    """Bytes of a tensor on the wire, without the padding behind it."""
    return plain_bytes(shape, dtype) if form is WireFormat.PLAIN else quantised_bytes(shape)


def offsets(bucket: WireBucket) -> Iterator[tuple[WireTensor, int]]:
    """Each tensor of a bucket with its first byte."""
    offset = 0
    for tensor in bucket.tensors:
        yield tensor, offset
        offset += padded(tensor.wire_bytes)
    assert offset == bucket.wire_bytes, f"a bucket says {bucket.wire_bytes} bytes and its tensors fill {offset}"
