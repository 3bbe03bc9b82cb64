"""Weights for others: memory shared with the weight agent beside this rank, and Hugging Face checkpoints.

In the shared memory, on CPU or GPU, every tensor lies whole and contiguous under its Hugging Face name.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from services.common.cuda_ipc import export_memory
from services.common.errors import FailedPrecondition
from services.common.model_overrides import config_of
from services.trainer.hf_files import EMBEDDING, find_tensors
from services.trainer.hf_mapping import hf_tensors
from services.trainer.hf_mtp import mtp_tensors, with_copies
from services.trainer.ranks import on_first_rank, together
from services.trainer.saving import TEMPORARY_PREFIX, sync
from services.trainer.step import Learner

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the POSIX shared memory of Linux
ALIGNMENT_BYTES = 64
"""A cache line, and more than any vector load needs."""
WHOLE = "model.safetensors"
"""All weights in one file."""
DTYPE_FIELDS = ("dtype", "torch_dtype")
"""Of a config.json: today's, and the one before it."""
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth")

Weights = Callable[[], Iterator[tuple[str, Tensor]]]
"""The weights as they are when it is called, by Hugging Face name."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one tensor, or a slice of it, lies in the shared memory; fields as in weight_sync's ShardSlice."""

    name: str
    full_shape: tuple[int, ...]
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    strides: tuple[int, ...]


def plan_slices(tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[Slice], int]:
    """Place whole tensors, given by name, one after another. Returns the slices and the bytes that they need."""
    slices, offset = [], 0
    for name, tensor in tensors:
        shape = tuple(tensor.shape)
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        slices.append(Slice(name, shape, (0,) * len(shape), shape, dtype_name(tensor), offset, strides))
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return slices, offset


def shared_memory_path(run_id: str, rank: int) -> Path:
    """The file in shared memory that holds a rank's weights."""
    return SHARED_MEMORY / f"flotilla-{run_id}-rank{rank}"


class SharedWeights:
    """This rank's weights in shared memory, under a name that outlives a killed trainer."""

    def __init__(self, run_id: str, rank: int, tensors: Weights) -> None:
        self.path = shared_memory_path(run_id, rank)
        self._tensors = tensors
        self.slices, self.size_bytes = plan_slices(tensors())
        self.path.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.size_bytes)
            self._memory = mmap.mmap(descriptor, self.size_bytes)
        finally:
            os.close(descriptor)

    def write(self) -> None:
        """Copy the weights as they are now; nobody may be reading."""
        copy_tensors(self._tensors(), self.slices, torch.frombuffer(self._memory, dtype=torch.uint8))


class CudaWeights:
    """This rank's weights in memory of its GPU, which CUDA lets another process open; freed with the process alone."""

    def __init__(self, tensors: Weights, device: torch.device) -> None:
        """Allocate on a GPU. Raises FailedPrecondition if torch allocates in a way that cannot be shared."""
        self._tensors = tensors
        self.slices, size_bytes = plan_slices(tensors())
        self._flat = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.memory = export_memory(self._flat)

    def write(self) -> None:
        """Copy the weights as they are now, and wait until that is done; nobody may be reading."""
        copy_tensors(self._tensors(), self.slices, self._flat)
        torch.cuda.synchronize(self._flat.device)


def share_weights(run_id: str, rank: int, learner: Learner) -> SharedWeights | CudaWeights:
    """Room for a rank's weights where they are: in main memory or on its GPU."""
    device = next(learner.chunks[0].parameters()).device
    tensors = partial(hf_tensors, learner.chunks, learner.model)
    return CudaWeights(tensors, device) if device.type == "cuda" else SharedWeights(run_id, rank, tensors)


def copy_tensors(tensors: Iterable[tuple[str, Tensor]], slices: Sequence[Slice], flat: Tensor) -> None:
    """Copy every tensor to its place in `flat`, [bytes] uint8."""
    for one, (_name, tensor) in zip(slices, tensors, strict=True):
        target = flat[one.offset_bytes : one.offset_bytes + tensor.nbytes].view(tensor.dtype).view(one.shape)
        target.copy_(tensor)


def export_hf(
    learner: Learner, source: Path, target: Path, overrides: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write a Hugging Face checkpoint, each rank a file of what it owns. Atomic; replaces an old one.

    All ranks call it together, and share the file system.

    Args:
        learner: Has today's weights.
        source: Checkpoint that it started from: other files are as there, and layers for multi-token prediction that
            are not trained.
        target: Directory to write.
        overrides: Fields of config.json that the model has with other values.
    """
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}")
    on_first_rank(partial(make_anew, temporary))
    tensors = {name: tensor.cpu().contiguous().clone() for name, tensor in hf_tensors(learner.chunks, learner.model)}
    tensors = with_copies(tensors, learner.model, find_tensors(source))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0 and not learner.model.mtp_built:
        tensors |= mtp_tensors(learner.model, source)
    file = temporary / (f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors" if ranks > 1 else WHOLE)
    parts = together(partial(write_weights, tensors, file))
    written = {name: one for part in parts for name, one in part.items()}
    on_first_rank(partial(publish_hf, written, temporary, source, target, overrides))


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor in a safetensors file."""

    file: str
    size_bytes: int
    dtype: str


def write_weights(tensors: dict[str, Tensor], file: Path) -> dict[str, Written]:
    """Write a safetensors file, and force it to disk. Returns where each tensor is.

    Raises:
        FailedPrecondition: The disk is full, or fails.
    """
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise FailedPrecondition(f"{file}: not written: {error}") from error
    sync(file)
    return {name: Written(file.name, tensor.nbytes, dtype_name(tensor)) for name, tensor in tensors.items()}


def dtype_name(tensor: Tensor) -> str:
    """As torch and config.json spell it: bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def make_anew(directory: Path) -> None:
    """An empty directory, whatever was there."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def publish_hf(
    written: dict[str, Written], temporary: Path, source: Path, target: Path, overrides: Mapping[str, Any]
) -> None:
    """On one rank, when all weights have been written: add index and other files, force them to disk, rename.

    Args:
        written: All tensors.
        temporary: Directory that has the weights.
        source: Checkpoint whose other files are copied: config, tokenizer, licence.
        target: Directory to make.
        overrides: Fields of config.json that are replaced.
    """
    for file in source.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in WEIGHT_FILES):
            shutil.copy2(file, temporary)
    before, config = config_of(source, {}), config_of(source, overrides)
    # A few tensors are float32 whatever the others are; this one is never among them.
    config |= {name: written[EMBEDDING].dtype for name in DTYPE_FIELDS if name in config}
    if config != before:
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weight_map = {name: one.file for name, one in sorted(written.items())}
    total = sum(one.size_bytes for one in written.values())
    if not (temporary / WHOLE).is_file():
        table = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (temporary / f"{WHOLE}.index.json").write_text(json.dumps(table, indent=2))
    for path in (*temporary.iterdir(), temporary):
        sync(path)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    sync(target.parent)
