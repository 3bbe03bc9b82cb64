"""Checkpoints of a run: `checkpoints/step-00000020/`, torch_dist format plus `state.json`.

A directory of that name is complete: it is written under another name, forced to disk, and renamed. What a killed save
leaves behind has the other name, and the next save removes it. A checkpoint can be loaded in another parallel layout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from services.common.errors import FailedPrecondition
from services.trainer.megatron import (
    CheckpointingException,
    dist_checkpointing,
    get_cuda_rng_tracker,
    parallel_state,
)
from services.trainer.step import Learner

STATE_FILE = "state.json"
FORMAT = 1
TEMPORARY_PREFIX = ".unfinished-"
_NAME = re.compile(r"step-(\d{8})")


class CheckpointError(FailedPrecondition):
    """A checkpoint cannot be used; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint says about the run, beside the weights."""

    step: int
    """Rollout steps that it contains."""
    spec_digest: str
    """Of the run that wrote it."""
    batch_digests: tuple[str, ...]
    """Of batches 0 to step - 1."""


def checkpoint_steps(root: Path) -> list[int]:
    """Steps of all complete checkpoints under a directory, oldest first."""
    names = [_NAME.fullmatch(path.name) for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(name[1]) for name in names if name)


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return root / f"step-{step:08d}"


def remove_old(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for step in checkpoint_steps(root)[:-keep]:
        shutil.rmtree(checkpoint_path(root, step))


def save(root: Path, learner: Learner, state: RunState) -> Path:
    """Write the checkpoint of a step; final on disk when this returns. Keeps one that is there already."""
    final = checkpoint_path(root, state.step)
    if final.is_dir():
        return final
    for left_over in root.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(left_over)
    temporary = root / f"{TEMPORARY_PREFIX}{final.name}"
    temporary.mkdir(parents=True)
    dist_checkpointing.save(_sharded_state(learner, is_loading=False), str(temporary), verify_integrity=True)
    (temporary / STATE_FILE).write_text(json.dumps({"format": FORMAT, **asdict(state)}, indent=1))
    _force_to_disk(temporary)
    temporary.rename(final)
    _sync(root)
    return final


def load(path: Path, learner: Learner, spec_digest: str) -> RunState:
    """Fill the learner from a checkpoint.

    Raises:
        CheckpointError: It belongs to another run, or is damaged.
    """
    state = read_state(path)
    if state.spec_digest != spec_digest:
        raise CheckpointError(
            f"{path}: written by a run with another spec (digest {state.spec_digest[:12]}, now {spec_digest[:12]}); "
            "give this run a run_dir of its own, or restore its run spec"
        )
    wanted = _sharded_state(learner, is_loading=True)
    try:
        loaded: Any = dist_checkpointing.load(wanted, str(path), verify_integrity=True)
    except (CheckpointingException, OSError) as error:
        raise CheckpointError(f"{path}: damaged: {error}; remove it to start from the one before") from error
    for chunk, weights in zip(learner.chunks, loaded["model"], strict=True):
        chunk.load_state_dict(weights)
    learner.optimizer.megatron.load_state_dict(loaded["optimizer"])
    torch.set_rng_state(loaded["rng"]["torch"])
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(loaded["rng"]["tracker"])
    return state


def read_state(path: Path) -> RunState:
    """What a checkpoint says about its run. Raises CheckpointError if it is not one of ours."""
    try:
        table = json.loads((path / STATE_FILE).read_text())
        if table["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {table['format']}, but this version reads format {FORMAT}")
        return RunState(table["step"], table["spec_digest"], tuple(table["batch_digests"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: {STATE_FILE} is missing or damaged ({error}); not a usable checkpoint"
        ) from error


def _sharded_state(learner: Learner, *, is_loading: bool) -> dict[str, Any]:
    layout = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    model = [chunk.sharded_state_dict(metadata=layout) for chunk in learner.chunks]
    optimizer = learner.optimizer.megatron.sharded_state_dict(model, is_loading=is_loading, metadata=layout)
    tracker: Any = get_cuda_rng_tracker()
    rng = {"torch": torch.get_rng_state(), "tracker": tracker.get_states()}
    return {"model": model, "optimizer": optimizer, "rng": rng}


def _force_to_disk(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
