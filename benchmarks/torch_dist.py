"""Speed and memory of conversions between Hugging Face's layout and Megatron's torch_dist, on this machine's CPU.

    python -m benchmarks.torch_dist [--directory /dev/shm]

Models of random bfloat16 weights; the seconds include the start of Python. Memory is the largest process at its peak,
and beside it what the imports alone take.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.models import DEEPSEEK_1B, QWEN3
from benchmarks.records import Row, table

MODELS: dict[str, dict[str, Any]] = {"Qwen3-0.6B": QWEN3["0.6b"], "DeepSeek-V3-shaped 1 B": DEEPSEEK_1B}
DEADLINE_S = 600
"""Of one process; each took less than a minute here."""
CONVERT = ["-m", "services.trainer.convert"]


def save_random(directory: Path, config: dict[str, Any]) -> int:
    """A checkpoint of a shape. Returns the bytes of its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return sum(one.stat().st_size for one in directory.glob("*.safetensors"))


def measure(arguments: list[str], processes: int) -> tuple[float, float]:
    """Seconds, and MB of the largest process, of a module of Python."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    began = time.perf_counter()
    with tempfile.TemporaryFile() as words:
        command = [sys.executable, *launcher, *arguments]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=words)
        while True:
            ended, status, used = os.wait4(child.pid, os.WNOHANG)  # its largest descendant counts too
            seconds = time.perf_counter() - began
            if ended:
                break
            if seconds > DEADLINE_S:
                child.kill()
                sys.exit(f"{arguments}: not done after {DEADLINE_S} s")
            time.sleep(0.01)
        if status:
            words.seek(0)
            sys.exit(f"{arguments} failed: {words.read().decode()}")
    return seconds, used.ru_maxrss / 1e3


def rows_of(name: str, root: Path, processes: int) -> list[Row]:
    """Both ways."""
    # In a process of its own: Linux counts what we hold to what our children are given.
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        size = other.submit(save_random, root / "hf", MODELS[name]).result(DEADLINE_S)
    there = [*CONVERT, "hf-to-torch-dist", "--hf", str(root / "hf"), "--output", str(root / "torch_dist")]
    back = [*CONVERT, "torch-dist-to-hf", "--checkpoint", str(root / "torch_dist")]
    back += ["--hf", str(root / "hf"), "--output", str(root / "again")]
    found = []
    for conversion, arguments in (("hf-to-torch-dist", there), ("torch-dist-to-hf", back)):
        _, start = measure(["-m", "benchmarks.torch_dist", "--imports"], 1)
        seconds, peak = measure(arguments, processes)
        found.append(
            {
                "model": name,
                "conversion": conversion,
                "processes": processes,
                "weights, GB": size / 1e9,
                "seconds": seconds,
                "memory of a process, MB": round(peak),
                "start, MB": round(start),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the files go for a while")
    parser.add_argument("--imports", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.imports:
        import services.trainer.torch_dist  # noqa: F401

        return
    rows: list[Row] = []
    for name in MODELS:
        for processes in (1, 2):
            with tempfile.TemporaryDirectory(dir=given.directory) as folder:
                rows += rows_of(name, Path(folder), processes)
    print(table(rows))


if __name__ == "__main__":
    main()
