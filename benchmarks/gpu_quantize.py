"""Speed of the kernels of weight_sync on one GPU: block quantisation, encoding of a bucket, digest.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.records import table, write_record
from services.weight_sync.digest_torch import digest_bucket
from services.weight_sync.digest_triton import digest_cuda
from services.weight_sync.layout import offsets, padded, quantised_bytes
from services.weight_sync.quantize import Placement, quantize_reference, values_and_scales
from services.weight_sync.quantize_triton import quantize_cuda
from services.weight_sync.records import WireBucket, WireFormat, WireTensor
from services.weight_sync.wire import encode_bucket

WORKLOADS = [(24, 8192, 7168), (64, 2048, 7168)]
"""Matrices, rows, columns."""
QUANTISE_WARPS = [8, 16]
DIGEST_WARPS = [4, 8]
COPY_BYTES = 2 << 30
DIGEST_TENSOR_BYTES = 64 << 20
DIGEST_TENSORS = [8, 64]
"""As many as a bucket has, and so many that the kernel alone counts."""
REPEATS = 20
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
    for workload in WORKLOADS:
        yield from quantisation(*workload)
        torch.cuda.empty_cache()
    for count in DIGEST_TENSORS:
        yield from digest(count)


def device_copy() -> Figure:
    """The ceiling."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return timed("device copy", "copy_", 2 * COPY_BYTES, lambda: target.copy_(source), lambda: target.equal(source))


def quantisation(count: int, rows: int, columns: int) -> Iterator[Figure]:
    """The kernel with its table and its check, then the encoding of a bucket of them as the agent does it."""
    shape = (rows, columns)
    xs = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    bucket = bucket_of([WireTensor(f"t{i}", shape, "bfloat16", FP8, quantised_bytes(shape)) for i in range(count)])
    buffer = torch.empty(bucket.wire_bytes, dtype=torch.uint8, device="cuda")
    matrices = [Placement(f"t{i}", x, start) for i, (x, (_, start)) in enumerate(zip(xs, offsets(bucket), strict=True))]
    expected = [(m.start, *quantize_reference(m.x)) for m in (matrices[0], matrices[-1])]
    tensors = {matrix.name: matrix.x for matrix in matrices}

    def equal() -> bool:
        found = [values_and_scales(buffer[start:], shape) for start, *_ in expected]
        equals = [
            values.view(torch.uint8).equal(v.view(torch.uint8)) and scales.equal(s)
            for (values, scales), (_, v, s) in zip(found, expected, strict=True)
        ]
        buffer.zero_()
        return all(equals)

    works: dict[str, Callable[[], Any]] = {
        f"quantize_cuda, {warps} warps": partial(quantize_cuda, buffer, matrices, warps) for warps in QUANTISE_WARPS
    }
    works["encode_bucket"] = lambda: encode_bucket(bucket, tensors, buffer.device, buffer)
    size = bucket.wire_bytes + sum(x.nbytes for x in xs)
    for variant, work in works.items():
        yield timed(f"{count} x [{rows}, {columns}]", variant, size, work, equal)


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
