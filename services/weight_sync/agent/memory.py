"""The trainer's parameters in memory that it shares, on CPU or GPU: mapped, read as whole HF tensors."""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from services.common.cuda_ipc import CudaMemory, Opened, open_memory
from services.common.errors import FailedPrecondition, InvalidArgument
from services.weight_sync.layout import DTYPE_BYTES
from services.weight_sync.records import ShardSlice
from services.weight_sync.wire import torch_dtype

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the contract names it


@dataclass(frozen=True, slots=True)
class Registration:
    """Mapped memory and what lies in it; equal to another of the same memory."""

    where: str
    """Path of a file, or UUID of a GPU."""
    identity: object
    """Device and inode of the file, or handle of the allocation: what was made anew has another."""
    slices: tuple[ShardSlice, ...]
    memory: torch.Tensor = field(compare=False, repr=False)
    """[size] uint8; reading only."""
    opened: Opened | None = field(default=None, compare=False, repr=False)

    def close(self) -> None:
        """Let go of the memory; nobody may be reading."""
        if self.opened is not None:
            self.opened.close()


def map_cuda_memory(memory: CudaMemory, slices: Sequence[ShardSlice]) -> Registration:
    """Map memory of a GPU.

    Raises:
        InvalidArgument: This process does not see the GPU, or a slice does not fit.
        FailedPrecondition: There is no such memory.
    """
    check_slices(slices, memory.size_bytes)
    opened = open_memory(memory)
    return Registration(f"GPU {memory.gpu_uuid}", memory, tuple(slices), opened.tensor, opened)


def map_memory(path: str, size_bytes: int, slices: Sequence[ShardSlice]) -> Registration:
    """Map a file of shared memory.

    Raises:
        InvalidArgument: A path outside /dev/shm, or a slice that does not fit.
        FailedPrecondition: There is no such file, or it is shorter than it should be.
    """
    check_slices(slices, size_bytes)
    if SHARED_MEMORY not in Path(path).resolve().parents:
        raise InvalidArgument(f"{path} is not under {SHARED_MEMORY}", field="shared_memory_path")
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            mapped = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"cannot map {size_bytes} bytes of {path}: {error}") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
    return Registration(path, (status.st_dev, status.st_ino), tuple(slices), memory)


def check_slices(slices: Sequence[ShardSlice], size_bytes: int) -> None:
    """Raise InvalidArgument, naming the slice, if one is malformed or reaches out of its tensor or the memory."""
    for one in slices:
        if problem := _problem(one, size_bytes):
            raise InvalidArgument(f"the slice of {one.name} {problem}", field="slices")


def _problem(one: ShardSlice, size_bytes: int) -> str:
    if one.dtype not in DTYPE_BYTES:
        return f"has an unknown dtype {one.dtype}"
    if not len(one.full_shape) == len(one.begin) == len(one.shape) == len(one.strides):
        return "has full_shape, begin, shape and strides of different lengths"
    if any(b < 0 or s < 0 or b + s > n for b, s, n in zip(one.begin, one.shape, one.full_shape, strict=True)):
        return "lies outside its tensor"
    item = DTYPE_BYTES[one.dtype]
    if one.offset_bytes % item or min(one.strides, default=0) < 0:
        return "has an offset that is not a multiple of its element, or a negative stride"
    last = sum((size - 1) * stride for size, stride in zip(one.shape, one.strides, strict=True))
    if one.offset_bytes < 0 or (math.prod(one.shape) and one.offset_bytes + (last + 1) * item > size_bytes):
        return "lies outside the memory"
    return ""


def read_tensors(registration: Registration) -> dict[str, torch.Tensor]:
    """Copies of the HF tensors that the slices are of, by name; elements outside the slices are undefined."""
    tensors: dict[str, torch.Tensor] = {}
    for one in registration.slices:
        whole = tensors.get(one.name)
        if whole is None:
            dtype, device = torch_dtype(one.dtype), registration.memory.device
            whole = tensors[one.name] = torch.empty(one.full_shape, dtype=dtype, device=device)
        _region(whole, one).copy_(_view(registration.memory, one))
    return tensors


def whole_tensors(registration: Registration) -> dict[str, torch.Tensor]:
    """Views of the HF tensors that the memory holds in one slice, by name."""
    whole = (one for one in registration.slices if one.shape == one.full_shape)
    return {one.name: _view(registration.memory, one) for one in whole}


def _region(whole: torch.Tensor, one: ShardSlice) -> torch.Tensor:
    for dimension, (begin, size) in enumerate(zip(one.begin, one.shape, strict=True)):
        whole = whole.narrow(dimension, begin, size)
    return whole


def _view(memory: torch.Tensor, one: ShardSlice) -> torch.Tensor:
    view = torch.empty(0, dtype=torch_dtype(one.dtype), device=memory.device)
    first = one.offset_bytes // DTYPE_BYTES[one.dtype]
    return view.set_(memory.untyped_storage(), first, one.shape, one.strides)
