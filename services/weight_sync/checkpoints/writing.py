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
from services.weight_sync.checkpoints.strips import Strip, matrix_shape, strip_rows, strips, write_exactly
from services.weight_sync.checkpoints.weights import FP8, Weight
from services.weight_sync.layout import SCALE_BYTES, Scaling
from services.weight_sync.quantize import quantize

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
    offset, scales_offset = job.offset, job.scales_offset
    largest = None if scaling.rows else _largest(job.weight)
    for strip in strips(job.weight, strip_rows([job.weight], scaling)):
        values, scales = _quantised(job.weight, _floats(job.weight, strip), largest, scaling)
        write_exactly(descriptor, values, offset)
        write_exactly(descriptor, scales, scales_offset)
        offset += values.nbytes
        scales_offset += scales.numel() * SCALE_BYTES if scaling.rows else 0
        advance(strip.values.nbytes)


def _quantised(
    weight: Weight, x: torch.Tensor, largest: torch.Tensor | None, scaling: Scaling
) -> tuple[torch.Tensor, torch.Tensor]:
    """[r, C] e4m3fn and scales. For one scale of the whole matrix, each strip gets a row with its largest element."""
    if largest is not None:
        x = torch.cat([x, largest.expand(1, x.shape[1])])
    try:
        values, scales = quantize(x, weight.name, scaling)
    except ValueError as error:
        raise CheckpointError(f"{weight.entry.file}: {error}") from None
    return values[: x.shape[0] - 1] if largest is not None else values, scales


def _largest(weight: Weight) -> torch.Tensor:
    """[] largest magnitude of a matrix, in the dtype that it is quantised from; NaN if there is one."""
    step = strip_rows([weight])
    ends = [torch.stack(torch.aminmax(_floats(weight, strip))) for strip in strips(weight, step)]
    return torch.stack(ends).abs().max()


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
