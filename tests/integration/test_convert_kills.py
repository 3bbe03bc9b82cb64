"""`flotilla convert` killed, interrupted and continued, and what memory it takes. Nothing is faked."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from services.weight_sync.checkpoints.convert import JOURNAL
from tests.checkpoints import files_of, load_checkpoint
from tests.conversions import ROOT, bf16_checkpoint, hear_ctrl_c, many_files, matrices, refused, to_fp8

ENDURED_KILLS = 5


def start(source: Path, target: Path, *options: str) -> subprocess.Popen[bytes]:
    """`flotilla convert` that has begun to write: its journal is there, unless it was so quick that it is gone.

    It gives way to the test, which wants to interrupt it.
    """
    command = [
        "nice",
        "-n",
        "19",
        sys.executable,
        "-m",
        "services.cli.main",
        "convert",
        "hf-to-fp8",
        str(source),
        str(target),
        *options,
    ]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=hear_ctrl_c
    )
    while not (target / JOURNAL).exists() and child.poll() is None:
        time.sleep(0.001)
    return child


def endure(tmp_path: Path, kills: int, seed: int) -> None:
    """Kill conversions at random and continue them, over and over; each must end as an undisturbed one."""
    source, target = many_files(tmp_path / "a", 60, 12), tmp_path / "b"
    assert to_fp8(source, tmp_path / "whole").exit_code == 0
    expected, chance, killed = files_of(tmp_path / "whole"), random.Random(seed), 0
    while killed < kills:
        shutil.rmtree(target, ignore_errors=True)
        while not (target / "config.json").exists() or (target / JOURNAL).exists():
            child = start(source, target, "--max-workers", "2")
            more = len(list(target.glob("*.safetensors"))) + chance.randrange(4)
            while child.poll() is None and len(list(target.glob("*.safetensors"))) < more:
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.03))
            child.kill()
            killed += child.wait() == -signal.SIGKILL
            if (target / "config.json").exists():
                assert files_of(target).items() >= expected.items()
        assert files_of(target) == expected


def test_killed_and_continued_it_is_as_if_undisturbed(tmp_path: Path) -> None:
    endure(tmp_path, ENDURED_KILLS, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_killed_50_times_and_continued_it_is_as_if_undisturbed(tmp_path: Path) -> None:
    endure(tmp_path, 50, seed=2)


def test_finished_files_are_kept_and_half_ones_made_again(tmp_path: Path) -> None:
    source = bf16_checkpoint(tmp_path / "a")
    assert to_fp8(source, tmp_path / "whole").exit_code == 0
    first, second = sorted(source.glob("*.safetensors"))
    # For a while, the second file has a weight that cannot be quantised.
    data, stamp = second.read_bytes(), second.stat()
    weight = matrices()["model.layers.0.self_attn.o_proj.weight"].view(torch.uint8).numpy().tobytes()
    second.write_bytes(data.replace(weight, b"\xff" * len(weight)))
    os.utime(second, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    refused(to_fp8(source, tmp_path / "b", "block", "--max-workers", 1), second, "not finite")
    (tmp_path / "b" / f"{second.name}.unfinished").write_bytes(b"half")
    second.write_bytes(data)
    os.utime(second, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    kept = (tmp_path / "b" / first.name).stat()
    refused(to_fp8(source, tmp_path / "b", "channel"), "other options")
    os.utime(second)
    refused(to_fp8(source, tmp_path / "b"), "has changed since")
    os.utime(second, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert to_fp8(source, tmp_path / "b").exit_code == 0
    assert files_of(tmp_path / "b") == files_of(tmp_path / "whole")
    assert (tmp_path / "b" / first.name).stat().st_ino == kept.st_ino


def test_ctrl_c_ends_with_130_and_can_be_continued(tmp_path: Path) -> None:
    source = many_files(tmp_path / "a", 400, 1)
    for _ in range(5):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        child = start(source, tmp_path / "b", "--max-workers", "1")
        while not list((tmp_path / "b").glob("*.safetensors.unfinished")) and child.poll() is None:
            time.sleep(0.001)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
        if child.returncode:  # else it was done before
            assert child.returncode == 130 and b"the same command continues" in errors
            break
    else:
        pytest.fail("it was done before Ctrl-C each time")
    assert set(files_of(tmp_path / "b")) == {JOURNAL}
    assert to_fp8(source, tmp_path / "b").exit_code == 0
    assert len(load_checkpoint(tmp_path / "b")) == 2


@pytest.mark.parametrize("after_s", [0.1, 0.4, 0.8, 1.5])
def test_ctrl_c_while_modules_load_ends_without_a_word_of_python(tmp_path: Path, after_s: float) -> None:
    command = [sys.executable, "-m", "services.cli.loading", "convert", "hf-to-fp8"]
    child = subprocess.Popen(
        [*command, bf16_checkpoint(tmp_path / "a"), tmp_path / "b"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        preexec_fn=hear_ctrl_c,
    )
    time.sleep(after_s)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    if b"Traceback" in errors and b"loading.py" not in errors:
        return  # It came while Python itself started, before the first line of Flotilla.
    assert b"Traceback" not in errors
    assert child.returncode in (130, -signal.SIGINT, 0), "0 if all was done"


MEASURE = """
import sys
from pathlib import Path
import torch
from services.weight_sync.checkpoints.convert import convert
from services.weight_sync.checkpoints.plan import plan_bf16, plan_fp8
from services.weight_sync.checkpoints.weights import open_directory
from services.weight_sync.layout import Scaling
from services.weight_sync.quantize import dequantize, quantize
from tests.checkpoints import peak_memory_bytes

source, target, workers, rows, columns = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:])
scaling = Scaling(rows, columns)
for dtype in (torch.bfloat16, torch.float32):
    dequantize(*quantize(torch.ones(128, 128, dtype=dtype), scaling=scaling), dtype, scaling)  # load what compiles
contents = open_directory(source)
before = peak_memory_bytes()
plan = plan_fp8(contents, scaling) if contents.format is None else plan_bf16(contents)
convert(plan, target, workers, lambda count: None)
print(peak_memory_bytes() - before)
"""


def test_memory_does_not_grow_with_files_matrices_or_workers(tmp_path: Path) -> None:
    """The bar is two files and 200 MB; what is needed is a few strips for each worker."""
    source = many_files(tmp_path / "a", 800, 8)

    def growth(source: Path, target: Path, block: tuple[int, int]) -> int:
        arguments = [sys.executable, "-c", MEASURE, source, target, 8, *block]
        return int(subprocess.check_output([str(one) for one in arguments], cwd=ROOT, timeout=250))

    assert growth(source, tmp_path / "b", (128, 128)) < 120e6
    assert growth(source, tmp_path / "c", (0, 0)) < 120e6
    assert growth(tmp_path / "b", tmp_path / "d", (128, 128)) < 120e6
