"""One rank of several on gloo: checkpoints saved in one layout and loaded in another.

A case is a model, a folder, the name under which it is loaded (or "") and that under which it is saved (or ""), and
the sizes of the layout (tests.trainer_ranks). Ends with an error if the steps differ from the uninterrupted run's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from services.common.run_checkpoints import checkpoint_path
from services.common.spec import ParallelSpec
from services.trainer.checkpoint import RunState, begin_save, load
from services.trainer.report import Metrics
from services.trainer.step import Learner
from tests.trainer_layouts import compare_steps, make_learner, train_step
from tests.trainer_ranks import run_cases

DIGEST = "d" * 64
STATE = RunState(2, DIGEST, ("batch-0", "batch-1"))


def check(model: str, folder: str, loaded: str, saved: str, sizes: dict[str, Any]) -> None:
    """Two steps or a checkpoint, then two more steps, during which the checkpoint is written."""
    learner = make_learner(Path(model), ParallelSpec(**sizes))
    if loaded:
        assert load(checkpoint_path(Path(folder, loaded), 2), learner, DIGEST) == STATE
        compare(steps(learner, 2, 4), json.loads(Path(folder, f"{loaded}.json").read_text()), sizes)
        return
    learner.load_initial_weights()
    steps(learner, 0, 2)
    saving = begin_save(Path(folder, saved), learner, STATE)
    found = steps(learner, 2, 4)
    assert saving.finish() == checkpoint_path(Path(folder, saved), 2)
    Path(folder, f"{saved}.json").write_text(json.dumps([found, sizes, dist.get_world_size()]))


def steps(learner: Learner, begin: int, end: int) -> list[Metrics]:
    """Metrics of some optimizer steps."""
    return [train_step(learner, number) for number in range(begin, end)]


def compare(found: list[Metrics], saved: list, sizes: dict[str, Any]) -> None:
    """Bit for bit in the same layout."""
    expected, *layout = saved
    if layout == [sizes, dist.get_world_size()]:
        assert found == expected
    compare_steps(found, expected)


if __name__ == "__main__":
    run_cases(check)
