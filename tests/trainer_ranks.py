"""Runs cases over several processes, on gloo or on a GPU each, all cases in one launch.

    python -m tests.MODULE RANK WORLD STORE_FILE CASES

CASES is JSON, a list of lists of arguments; of each the last is the layout, as in [parallel] of a run spec.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.common.spec import ParallelSpec
from services.trainer import megatron
from services.trainer.megatron import parallel_state

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 480.0


def run_ranks(module: str, world: int, cases: Sequence[Sequence[Any]], folder: Path) -> None:
    """All cases in one launch. Fails if a rank does."""
    store = folder / f"store-{module}-{world}"
    store.unlink(missing_ok=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.{module}", str(rank), str(world), str(store), json.dumps(cases)],
            cwd=ROOT,
            env={**os.environ, "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        ended = [(*rank.communicate(timeout=DEADLINE_S), rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for output, errors, code in ended:
        assert code == 0, f"{output}\n{errors[-3000:]}"
    assert ended[0][0].count("passed:") == len(cases)


def run_cases(check: Callable[..., None]) -> None:
    """In a rank: open Megatron's groups for each case, and check it."""
    rank, world, store, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    file_store = dist.FileStore(store, world)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(megatron.BACKEND, store=file_store, rank=rank, world_size=world)
    for case in cases:
        megatron.open_groups(1, ParallelSpec(**case[-1]))
        check(*case)
        parallel_state.destroy_model_parallel()
        if rank == 0:
            print("passed:", *case, flush=True)
    dist.barrier()
    dist.destroy_process_group()
