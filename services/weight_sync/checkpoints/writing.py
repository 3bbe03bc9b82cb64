"""One file of the result, written strip by strip to where the plan says."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.header import DTYPE_BYTES, Entry
from services.weight_sync.checkpoints.plan import Job, NewShard
from services.weight_sync.checkpoints.strips import Memory, Strip, matrix_shape, strip_rows, strips, write_exactly
from services.weight_sync.checkpoints.weights import FP8, Weight
from services.weight_sync.layout import Scaling, scale_shape
from services.weight_sync.quantize_cpu import largest_cpu, quantize_cpu

Advance = Callable[[int], None]
"""Told the bytes of weights that have been read since the last call; may raise, to stop."""


def write_shard(shard: NewShard, path: Path, advance: Advance) -> None:
    """Write a file of the result whole, or raise and leave a part of it.

    Raises:
        CheckpointError: A weight or a scale is not finite, or a source file has changed; names tensor and file.
    """
    with path.open("wb") as stream:
        stream.write(shard.header)
        stream.flush()
        os.ftruncate(stream.fileno(), shard.size_bytes)
        for job in shard.jobs:
            if job.weight.size_bytes:
                _write(job, stream.fileno(), advance)


def _write(job: Job, descriptor: int, advance: Advance) -> None:
    if job.scaling is None:
        _write_plain(job, descriptor, advance)
    else:
        _write_quantised(job, job.scaling, descriptor, advance)


def _write_plain(job: Job, descriptor: int, advance: Advance) -> None:
    weight = job.weight if job.weight.scale else _as_bytes(job.weight)
    offset = job.offset
    for strip in strips(weight, strip_rows([weight])):
        values = strip.dequantised(weight, torch.bfloat16) if weight.scale else strip.values
        write_exactly(descriptor, values, offset)
        offset += values.nbytes
        advance(strip.values.nbytes)


def _write_quantised(job: Job, scaling: Scaling, descriptor: int, advance: Advance) -> None:
    weight, offset, scales_offset, memory = job.weight, job.offset, job.scales_offset, Memory()
    largest = 0 if scaling.rows else _largest(weight)
    for strip in strips(weight, strip_rows([weight], scaling)):
        x = _floats(weight, strip)
        values = memory.tensor(tuple(x.shape), torch.float8_e4m3fn)
        scales = memory.tensor(scale_shape(x.shape, scaling), torch.float32)
        if not quantize_cpu(x, scaling, values, scales, largest):
            raise CheckpointError(f"{weight.entry.file}: {weight.name} has elements that are not finite")
        write_exactly(descriptor, values, offset)
        write_exactly(descriptor, scales, scales_offset)
        offset += values.nbytes
        scales_offset += scales.nbytes if scaling.rows else 0
        advance(strip.values.nbytes)


def _largest(weight: Weight) -> int:
    """Of a matrix, as `quantize_cpu` takes it."""
    return max(largest_cpu(_floats(weight, strip)) for strip in strips(weight, strip_rows([weight])))


def _floats(weight: Weight, strip: Strip) -> torch.Tensor:
    """[r, C] as it is quantised: fp8 as float32, so that nothing is rounded in between."""
    return strip.dequantised(weight, torch.float32) if weight.scale else strip.values


def _as_bytes(weight: Weight) -> Weight:
    """The weight as uint8, [R, bytes of a row], to be copied."""
    entry = weight.entry
    rows, columns = matrix_shape(entry.shape)
    return Weight(_retyped(entry, (rows, columns * DTYPE_BYTES[entry.dtype])))


def _retyped(entry: Entry, shape: tuple[int, int]) -> Entry:
    assert entry.dtype != FP8
    return replace(entry, dtype="U8", shape=shape)
