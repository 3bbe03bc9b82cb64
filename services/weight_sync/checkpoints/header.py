"""Headers of safetensors files: 8 bytes of length, little-endian, then JSON, then the data.

A file is as good as its header says or it is refused: every byte of the data belongs to one tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from services.weight_sync.checkpoints.errors import CheckpointError

DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
"""Of safetensors' names."""
LENGTH_BYTES = 8
LFS_POINTER = b"version https://git-lfs"
LARGEST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
HEADER_ALIGNMENT_BYTES = 8
METADATA = "__metadata__"
ESCAPED_SURROGATE = b"\\ud"
LARGEST_NUMBER = 1 << 62


class FileState(NamedTuple):
    """What tells a file from another one under its name, and from itself after a change."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: int | Path) -> FileState:
        """Of a path or a descriptor."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    name: str
    file: Path
    state: FileState
    """Of the file, when its header was read."""
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
    """A safetensors file: its tensors by offset, and what tells it from another."""

    file: Path
    entries: tuple[Entry, ...]
    state: FileState
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
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file")
    with file.open("rb") as stream:
        state = FileState.of(stream.fileno())
        size = state.size_bytes
        begin = stream.read(LENGTH_BYTES)
        if begin == LFS_POINTER[:LENGTH_BYTES]:
            raise CheckpointError(f"{file} is a pointer of Git LFS; `git lfs pull` brings the file")
        length = int.from_bytes(begin, "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, LARGEST_HEADER_BYTES):
            raise CheckpointError(f"{file} is truncated or no safetensors file: its header does not fit")
        text = stream.read(length)
    header = parse_object(text, f"{file}: its header", object_pairs_hook=_once(file))
    data = LENGTH_BYTES + length
    placed = [_entry(file, state, name, content, data) for name, content in header.items() if name != METADATA]
    entries = tuple(sorted(placed, key=lambda entry: (entry.begin, entry.size_bytes)))
    _check_offsets(file, entries, data, size)
    return Shard(file, entries, state, hashlib.sha256(text).hexdigest())


def make_header(tensors: Iterable[NewTensor]) -> tuple[bytes, dict[str, int]]:
    """A header, and the first byte of each tensor in the file; the largest elements come first, so all are aligned."""
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    offset, offsets = 0, {}
    for one in sorted(tensors, key=lambda one: (-DTYPE_BYTES[one.dtype], one.name)):
        end = offset + tensor_bytes(one.dtype, one.shape)
        header[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [offset, end]}
        offsets[one.name], offset = offset, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    encoded = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return encoded, {name: len(encoded) + begin for name, begin in offsets.items()}


def parse_object(text: bytes, what: str, **options: Any) -> dict[str, Any]:
    """A JSON object whose strings are Unicode text. Raises CheckpointError, which begins with `what`."""
    try:
        content = json.loads(text, **options)
        if ESCAPED_SURROGATE in text.lower():  # half of a pair would be an error whenever it is written
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{what} is not a JSON object")
    return content


def _once(file: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            raise CheckpointError(f"{file}: its header names a tensor twice")
        return content

    return once


def _entry(file: Path, state: FileState, name: str, content: Any, data: int) -> Entry:
    try:
        dtype, shape, (begin, end) = content["dtype"], content["shape"], content["data_offsets"]
        well_formed = isinstance(dtype, str) and isinstance(shape, list)
        well_formed &= all(type(number) is int and 0 <= number < LARGEST_NUMBER for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        well_formed, dtype, shape, begin, end = False, "", [], 0, 0
    if not well_formed:
        raise CheckpointError(f"{file}: the header has no dtype, shape and data_offsets for {name}")
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file}: {name} has the unknown dtype {dtype}")
    if end - begin != tensor_bytes(dtype, shape):
        raise CheckpointError(
            f"{file}: {name} is {dtype} {list(shape)}, {tensor_bytes(dtype, shape)} bytes, "
            f"and its data_offsets span {end - begin}"
        )
    return Entry(name, file, state, dtype, tuple(shape), data + begin)


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
