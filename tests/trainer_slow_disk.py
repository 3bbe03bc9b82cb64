"""One rank of two on gloo: the other one's disk is slower than ranks wait for each other in a collective.

A case is a model, a folder, and the sizes of the layout (tests.trainer_ranks).
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from services.common.spec import ParallelSpec
from services.trainer import saving
from services.trainer.checkpoint import RunState, read_state, save
from tests.trainer_layouts import make_learner
from tests.trainer_ranks import run_cases

PATIENCE_S, WRITE_S = 15.0, 25.0
STATE = RunState(1, "d" * 64, ("batch-0",))
write = saving._write


def write_slowly(*args: Any) -> dict[str, str]:
    """On rank 1."""
    time.sleep(WRITE_S if dist.get_rank() else 0)
    return write(*args)


def check(model: str, folder: str, sizes: dict[str, Any]) -> None:
    """Both wait, and the checkpoint is final."""
    learner = make_learner(Path(model), ParallelSpec(**sizes))
    learner.load_initial_weights()
    saving._write = write_slowly
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE_S), dist.group.WORLD)
    begun = time.monotonic()
    assert read_state(save(Path(folder), learner, STATE)) == STATE
    assert time.monotonic() - begun > WRITE_S


if __name__ == "__main__":
    run_cases(check)
