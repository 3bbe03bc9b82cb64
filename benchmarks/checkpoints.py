"""Speed and memory of `flotilla convert`, on this machine's CPU, from and to the page cache.

    python -m benchmarks.checkpoints [--directory /dev/shm] [--gigabytes 4] [--repeat 3]

Makes a checkpoint of bf16 matrices in files of half a gigabyte, as large as a layer's of DeepSeek-R1, and converts it.
Each conversion runs in a process of its own; the best of the repeats counts. One row converts nothing: it reads fp8 and
writes twice as many bytes, which is what the kernel takes of a conversion to bf16. The rate is in bytes of input: by
the clock, and by the CPU time of the process, which depends less on what else runs. Memory is what the process needs
more at its peak than when torch and the kernels were loaded; the bar is two files and 200 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.records import Row, table
from services.weight_sync.checkpoints.convert import convert
from services.weight_sync.checkpoints.plan import plan_bf16, plan_fp8
from services.weight_sync.checkpoints.strips import row_bytes, strip_rows, strips, write_exactly
from services.weight_sync.checkpoints.weights import Contents, Weight, open_directory
from services.weight_sync.layout import BLOCK_128, CHANNEL, TENSOR
from services.weight_sync.quantize import dequantize, quantize
from tests.checkpoints import peak_memory_bytes, random_matrix, save_checkpoint

SHAPE = (18432, 7168)
"""Of the dense MLP of DeepSeek-R1: 264 MB of bf16, two in a file."""
SCALINGS = {"block": BLOCK_128, "channel": CHANNEL, "tensor": TENSOR}
MOVED = "moved"
CASES = [
    ("hf-to-fp8 block", "bf16", "block"),
    ("hf-to-fp8 channel", "bf16", "channel"),
    ("hf-to-fp8 tensor", "bf16", "tensor"),
    ("fp8-to-bf16 from block", "block", "plain"),
    ("fp8-to-bf16 from channel", "channel", "plain"),
    ("read once, write twice", "block", MOVED),
    ("hf-to-fp8 block from channel", "channel", "block"),
]
"""Name, source and target."""


def make_source(directory: Path, gigabytes: float) -> None:
    """A bf16 checkpoint of about this size."""
    files = max(2, round(gigabytes * 1e9 / (4 * SHAPE[0] * SHAPE[1])))
    x = random_matrix(1024, SHAPE[1]).repeat(SHAPE[0] // 1024, 1)
    names = ("mlp.gate_proj", "mlp.up_proj")
    shards = [{f"model.layers.{layer}.{name}.weight": x.clone() for name in names} for layer in range(files)]
    save_checkpoint(directory, shards, {"model_type": "deepseek_v3", "torch_dtype": "bfloat16"})


def measure(source: Path, target: Path, workers: int) -> dict[str, float]:
    """Convert in this process. The target's name says what to."""
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32):
        for scaling in SCALINGS.values():  # load what compiles
            dequantize(*quantize(torch.ones(256, 256, dtype=dtype), scaling=scaling), dtype, scaling)
    contents = open_directory(source)
    work = partial(move, contents) if target.name == MOVED else partial(run, contents)
    before, began, cpu = peak_memory_bytes(), time.perf_counter(), time.process_time()
    work(target, workers)
    return {
        "gigabytes": sum(weight.size_bytes for weight in contents.weights.values()) / 1e9,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu,
        "megabytes": (peak_memory_bytes() - before) / 1e6,
        "two_files": 2 * max(shard.state.size_bytes for shard in contents.checkpoint.shards) / 1e6,
    }


def run(contents: Contents, target: Path, workers: int) -> None:
    """Convert."""
    plan = plan_bf16(contents) if target.name == "plain" else plan_fp8(contents, SCALINGS[target.name])
    convert(plan, target, workers, lambda count: None)


def move(contents: Contents, target: Path, workers: int) -> None:
    """Read every weight a strip at a time, and write it twice."""
    target.mkdir()

    def move_one(weight: Weight) -> None:
        with (target / weight.name).open("wb") as stream:
            for offset, strip in enumerate(strips(weight, rows := strip_rows([weight]))):
                for half in range(2):
                    write_exactly(stream.fileno(), strip.values, (2 * offset + half) * rows * row_bytes(weight))

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(move_one, contents.weights.values()))


def in_a_process(source: Path, target: Path, workers: int) -> dict[str, Any]:
    """`measure` in a process of its own; the target is made anew."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.checkpoints", "--measure", str(source), str(target), str(workers)]
    return json.loads(subprocess.check_output(command))


def row(name: str, workers: int, results: list[dict[str, float]]) -> Row:
    """The best of the repeats; of memory, the worst."""
    return {
        "conversion": name,
        "workers": workers,
        "input, GB": results[0]["gigabytes"],
        "GB/s": max(one["gigabytes"] / one["seconds"] for one in results),
        "GB/s of CPU time": max(one["gigabytes"] / one["cpu_seconds"] for one in results),
        "memory, MB": max(one["megabytes"] for one in results),
        "bar, MB": results[0]["two_files"] + 200,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the files go for a while")
    parser.add_argument("--gigabytes", type=float, default=4, help="of the bf16 checkpoint; three times that is needed")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        source, target, workers = given.measure
        print(json.dumps(measure(Path(source), Path(target), int(workers))))
        return
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        root = Path(folder)
        make_source(root / "bf16", given.gigabytes)
        rows = []
        for name, source, target in CASES:
            if not (root / source).exists():
                in_a_process(root / "bf16", root / source, os.cpu_count() or 1)
            for workers in (1, 2):
                results = [in_a_process(root / source, root / target, workers) for _ in range(given.repeat)]
                rows.append(row(name, workers, results))
            if target in ("plain", "tensor", MOVED):
                shutil.rmtree(root / target)
        print(table(rows))


if __name__ == "__main__":
    main()
