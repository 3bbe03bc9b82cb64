"""Speed of the kernels of weight_sync on one GPU: quantisation, decoding, encoding of a bucket, digest.

    python -m benchmarks.gpu_quantize --out quantize.json

Prints, for each variant, bytes read and written, TB/s from the call until the device is done (median), TB/s of what the
device does (mean, by the profiler), and whether the bytes equal the reference. Inputs are far larger than the
second-level cache.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import qwen3_linears
from benchmarks.records import table, write_record
from services.weight_sync.digest_torch import digest_bucket
from services.weight_sync.digest_triton import digest_cuda
from services.weight_sync.layout import BLOCK_128, CHANNEL, TENSOR, Scaling, padded, quantised_bytes
from services.weight_sync.quantize import (
    Encoded,
    Placement,
    dequantize_reference,
    quantize,
    quantize_reference,
    values_and_scales,
)
from services.weight_sync.quantize_cuda import dequantize_cuda, quantize_cuda
from services.weight_sync.records import WireBucket, WireFormat, WireTensor
from services.weight_sync.wire import encode_bucket

WORKLOADS = {
    "24 x [8192, 7168]": [(8192, 7168)] * 24,
    "64 x [2048, 7168]": [(2048, 7168)] * 64,
    "Qwen3-0.6B, all linear layers": qwen3_linears("0.6b"),
}
"""Matrices of one launch."""
QUANTISE_WARPS = [4, 8]
SCALINGS = {"rows": CHANNEL, "matrices": TENSOR, "blocks, UE8M0": Scaling(128, 128, ue8m0=True)}
DIGEST_WARPS = [4, 8]
COPY_BYTES = 2 << 30
DIGEST_TENSOR_BYTES = 64 << 20
DIGEST_TENSORS = [8, 64]
"""As many as a bucket has, and so many that the kernel alone counts."""
REPEATS = 20
Shape = tuple[int, int]
FP8, PLAIN = WireFormat.FP8_BLOCK_128, WireFormat.PLAIN


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table."""

    workload: str
    variant: str
    gigabytes: float
    """Read and written."""
    terabytes_per_s: float
    device_terabytes_per_s: float | None
    """None where the profiler may not trace the device."""
    equal: bool


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    out = parser.parse_args().out
    figures = []
    for figure in measure():
        print(figure, flush=True)
        figures.append(figure)
    rows = [
        {
            "workload": one.workload,
            "variant": one.variant,
            "GB moved": one.gigabytes,
            "TB/s": one.terabytes_per_s,
            "TB/s on the device": one.device_terabytes_per_s,
            "bytes equal": "yes" if one.equal else "no",
        }
        for one in figures
    ]
    print(table(rows))
    write_record(out, "quantize", rows)
    sys.exit(0 if all(one.equal for one in figures) else 1)


def measure() -> Iterator[Figure]:
    """Every figure, one workload after the other."""
    yield device_copy()
    for workload, shapes in WORKLOADS.items():
        yield from quantisation(workload, shapes)
        yield from decoding(workload, shapes)
        torch.cuda.empty_cache()
    for variant, scaling in SCALINGS.items():
        yield from other_scaling("24 x [8192, 7168]", variant, scaling)
        torch.cuda.empty_cache()
    for count in DIGEST_TENSORS:
        yield from digest(count)


def device_copy() -> Figure:
    """The ceiling."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return timed("device copy", "copy_", 2 * COPY_BYTES, lambda: target.copy_(source), lambda: target.equal(source))


def quantisation(workload: str, shapes: Sequence[Shape]) -> Iterator[Figure]:
    """The kernel with its table and its check, then the encoding of a bucket of them as the agent does it."""
    bucket = bucket_of(
        [WireTensor(f"t{i}", one, "bfloat16", FP8, quantised_bytes(one)) for i, one in enumerate(shapes)]
    )
    buffer, matrices = torch.empty(bucket.wire_bytes, dtype=torch.uint8, device="cuda"), placed(shapes, BLOCK_128)
    tensors = {matrix.name: matrix.x for matrix in matrices}
    works: dict[str, Callable[[], Any]] = {
        f"quantize_cuda, {warps} warps": partial(quantize_cuda, buffer, matrices, BLOCK_128, warps)
        for warps in QUANTISE_WARPS
    }
    works["encode_bucket"] = lambda: encode_bucket(bucket, tensors, buffer.device, buffer)
    size = bucket.wire_bytes + sum(one.x.nbytes for one in matrices)
    for variant, work in works.items():
        yield timed(workload, variant, size, work, lambda: is_quantised(buffer, matrices, BLOCK_128))


def other_scaling(workload: str, variant: str, scaling: Scaling) -> Iterator[Figure]:
    """The kernels for other scales, as often as they read and write what they must."""
    matrices = placed(WORKLOADS[workload], scaling)
    last = matrices[-1]
    buffer = torch.empty(last.start + padded(quantised_bytes(last.x.shape, scaling)), dtype=torch.uint8, device="cuda")
    size = len(buffer) + sum(one.x.nbytes for one in matrices)
    work = partial(quantize_cuda, buffer, matrices, scaling)
    yield timed(workload, f"quantize_cuda, {variant}", size, work, lambda: is_quantised(buffer, matrices, scaling))


def decoding(workload: str, shapes: Sequence[Shape]) -> Iterator[Figure]:
    """Back to bfloat16."""
    encoded = []
    for i, shape in enumerate(shapes):
        values, scales = quantize(torch.randn(shape, dtype=torch.bfloat16, device="cuda"))
        encoded.append(Encoded(f"t{i}", values, scales, torch.empty(shape, dtype=torch.bfloat16, device="cuda")))
    size = sum(one.values.nbytes + one.scales.nbytes + one.out.nbytes for one in encoded)

    def equal() -> bool:
        one = encoded[-1]
        return one.out.equal(dequantize_reference(one.values, one.scales, one.out.dtype))

    yield timed(workload, "dequantize_cuda", size, partial(dequantize_cuda, encoded, BLOCK_128), equal)


def placed(shapes: Sequence[Shape], scaling: Scaling) -> list[Placement]:
    """Matrices of noise, one behind the other."""
    matrices, start = [], 0
    for i, shape in enumerate(shapes):
        matrices.append(Placement(f"t{i}", torch.randn(shape, dtype=torch.bfloat16, device="cuda"), start))
        start += padded(quantised_bytes(shape, scaling))
    return matrices


def is_quantised(buffer: torch.Tensor, matrices: Sequence[Placement], scaling: Scaling) -> bool:
    """Whether the first and the last of the matrices are as the reference has them; then the buffer is cleared."""
    equals = []
    for one in (matrices[0], matrices[-1]):
        found, expected = (
            values_and_scales(buffer[one.start :], one.x.shape, scaling),
            quantize_reference(one.x, scaling),
        )
        equals.append(found[0].view(torch.uint8).equal(expected[0].view(torch.uint8)) and found[1].equal(expected[1]))
    buffer.zero_()
    return all(equals)


def digest(count: int) -> Iterator[Figure]:
    """`digest_cuda`, with its launch and the wait for the result."""
    shape = (DIGEST_TENSOR_BYTES // 2,)
    bucket = bucket_of([WireTensor(f"t{i}", shape, "bfloat16", PLAIN, DIGEST_TENSOR_BYTES) for i in range(count)])
    buffer = torch.randint(0, 256, (bucket.wire_bytes,), dtype=torch.uint8, device="cuda")
    expected = digest_bucket(bucket, buffer.cpu())
    for warps in DIGEST_WARPS:
        compute = partial(digest_cuda, bucket, buffer, warps)
        yield timed(
            f"digest, {bucket.wire_bytes >> 20} MiB",
            f"{warps} warps",
            bucket.wire_bytes,
            compute,
            lambda compute=compute: compute() == expected,
        )


def bucket_of(tensors: list[WireTensor]) -> WireBucket:
    """A bucket of these."""
    return WireBucket(0, tuple(tensors), sum(padded(tensor.wire_bytes) for tensor in tensors))


def timed(workload: str, variant: str, size: int, work: Callable[[], Any], equal: Callable[[], bool]) -> Figure:
    """Run and time `work`, which moves `size` bytes; then ask whether its result is right.

    Device seconds are of kernels and copies alone, by the profiler; the others from the call until the device is done.
    """
    for _ in range(REPEATS):
        work()
    seconds = median(host_seconds(work) for _ in range(REPEATS))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPEATS):
            work()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or [] if event.device_type.name == "CUDA"]
    device_seconds = sum(event.time_range.elapsed_us() for event in events) / 1e6 / REPEATS
    device_per_s = size / device_seconds / 1e12 if device_seconds else None
    return Figure(workload, variant, size / 1e9, size / seconds / 1e12, device_per_s, equal())


def host_seconds(work: Callable[[], Any]) -> float:
    """From the call until the device is done."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
