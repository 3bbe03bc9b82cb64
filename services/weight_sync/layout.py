"""Sizes and offsets on the wire, as pure functions; sender, receiver and plan share them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from services.weight_sync.records import WireBucket, WireFormat, WireTensor

BLOCK = 128
"""Rows and columns of a quantisation block."""
ALIGNMENT_BYTES = 16
"""Every tensor of a bucket, and its scales, start at a multiple of it, so that a view of any dtype is aligned."""
SCALE_BYTES = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""What a trainer may hold; block quantisation applies to each of them."""


def padded(size_bytes: int) -> int:
    """Size rounded up to the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Shape of the scales of a matrix: one for each 128x128 block, ragged ones included."""
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def plain_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor as its dtype says."""
    return math.prod(shape) * DTYPE_BYTES[dtype]


def scales_offset(shape: Sequence[int]) -> int:
    """First byte of the scales of a quantised matrix: its values come before, padded."""
    return padded(math.prod(shape))


def quantised_bytes(shape: Sequence[int]) -> int:
    """Bytes of a quantised matrix: values, padded, and scales."""
    return scales_offset(shape) + math.prod(scale_shape(shape)) * SCALE_BYTES


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
