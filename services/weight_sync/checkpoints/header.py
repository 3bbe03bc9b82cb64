"""Headers of safetensors files: 8 bytes of length, little-endian, then JSON, then the data.

A file is as good as its header says or it is refused: every byte of the data belongs to one tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from services.weight_sync.checkpoints.errors import CheckpointError

DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
"""Of safetensors' names."""
LENGTH_BYTES = 8
LARGEST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
HEADER_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    name: str
    file: Path
    dtype: str
    """As safetensors calls it: BF16, F8_E4M3."""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file: its tensors by offset, its size, and what tells it from another."""

    file: Path
    entries: tuple[Entry, ...]
    size_bytes: int
    modified_ns: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return DTYPE_BYTES[dtype] * prod(shape)


def read_shard(file: Path) -> Shard:
    """Read and check the header of a file. Raises CheckpointError."""
    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, LARGEST_HEADER_BYTES):
            raise CheckpointError(f"{file} is truncated or no safetensors file: its header does not fit")
        text = stream.read(length)
    header = _parse(file, text)
    data = LENGTH_BYTES + length
    placed = [_entry(file, name, content, data) for name, content in header.items() if name != "__metadata__"]
    entries = tuple(sorted(placed, key=lambda entry: (entry.begin, entry.size_bytes)))
    _check_offsets(file, entries, data, size)
    return Shard(file, entries, size, file.stat().st_mtime_ns, hashlib.sha256(text).hexdigest())


def make_header(tensors: Iterable[NewTensor]) -> tuple[bytes, dict[str, int]]:
    """A header, and the first byte of each tensor in the file; the largest elements come first, so all are aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, {}
    for one in sorted(tensors, key=lambda one: (-DTYPE_BYTES[one.dtype], one.name)):
        end = offset + tensor_bytes(one.dtype, one.shape)
        header[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [offset, end]}
        offsets[one.name], offset = offset, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    encoded = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return encoded, {name: len(encoded) + begin for name, begin in offsets.items()}


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            raise CheckpointError(f"{file}: its header names a tensor twice")
        return content

    try:
        header = json.loads(text, object_pairs_hook=once)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise CheckpointError(f"{file}: its header is not JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header is not a JSON object")
    return header


def _entry(file: Path, name: str, content: Any, data: int) -> Entry:
    try:
        dtype, shape, (begin, end) = content["dtype"], tuple(content["shape"]), content["data_offsets"]
        well_formed = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        well_formed, dtype, shape, begin, end = False, "", (), 0, 0
    if not well_formed:
        raise CheckpointError(f"{file}: the header has no dtype, shape and data_offsets for {name}")
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file}: {name} has the unknown dtype {dtype}")
    if end - begin != tensor_bytes(dtype, shape):
        raise CheckpointError(
            f"{file}: {name} is {dtype} {list(shape)}, {tensor_bytes(dtype, shape)} bytes, "
            f"and its data_offsets span {end - begin}"
        )
    return Entry(name, file, dtype, shape, data + begin)


def _check_offsets(file: Path, entries: Sequence[Entry], data: int, size: int) -> None:
    at = data
    for entry in entries:
        if entry.begin != at:
            what = "overlaps the tensor before it" if entry.begin < at else "leaves a gap before it"
            raise CheckpointError(f"{file}: {entry.name} {what}")
        at += entry.size_bytes
    if at != size:
        what = "truncated" if size < at else "too long"
        raise CheckpointError(f"{file} is {what}: its header describes {at} bytes and it has {size}")
