"""Checkpoints of a run: `checkpoints/step-00000020/`, torch_dist format plus `state.json`.

All ranks save and load together. A directory of that name is complete (services.trainer.saving). It can be loaded in
another layout, optimizer included; random states then begin anew from the seed, since they belong to the ranks.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.common.run_checkpoints import (
    CHECKPOINTS,
    STATE_FILE,
    checkpoint_path,
    checkpoint_steps,
    why_no_checkpoint,
)
from services.trainer.boxes import optimizer_boxes, owned_boxes, weight_boxes
from services.trainer.loading import CheckpointError, fill, read_table
from services.trainer.megatron import ShardedObject, get_cuda_rng_tracker, parallel_state
from services.trainer.ranks import on_first_rank
from services.trainer.saving import TEMPORARY_PREFIX, Saving
from services.trainer.step import Learner

STEPS = "optimizer_steps"


@dataclass(frozen=True, slots=True)
class RunState:
    """What a checkpoint says about the run, beside the weights."""

    step: int
    """Rollout steps that it contains."""
    spec_digest: str
    """Of the run that wrote it."""
    batch_digests: tuple[str, ...]
    """Of batches 0 to step - 1."""


def find_checkpoint(source: Path) -> Path:
    """The newest checkpoint of a run, given its directory; or the checkpoint that is given itself.

    Raises:
        CheckpointError: The run has none, or it is neither.
    """
    if (source / STATE_FILE).is_file():
        return source
    root = source / CHECKPOINTS
    if steps := checkpoint_steps(root):
        return checkpoint_path(root, steps[-1])
    named = source.parent.name == CHECKPOINTS
    raise CheckpointError(why_no_checkpoint(source) if named else f"{root}: there is no complete checkpoint")


def remove_old(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; for one rank."""
    for step in checkpoint_steps(root)[:-keep]:
        shutil.rmtree(checkpoint_path(root, step))


def save(root: Path, learner: Learner, state: RunState) -> Path:
    """Write the checkpoint of a step; final on disk when this returns. Keeps one that is there already."""
    return begin_save(root, learner, state).finish()


def begin_save(root: Path, learner: Learner, state: RunState) -> Saving:
    """Begin the checkpoint of a step, and return when training may go on; `finish` makes it final.

    Needs host memory for what this rank owns: with bfloat16 14 bytes for each of its parameters. What killed saves left
    goes.
    """
    on_first_rank(partial(_remove_unfinished, root))
    return Saving(
        checkpoint_path(root, state.step),
        owned_boxes(learner.chunks, learner.optimizer),
        {**asdict(state), "layout": _layout()},
        [_random_object(_random_state())],
        {STEPS: learner.optimizer.applied_steps},
    )


def load(path: Path, learner: Learner, spec_digest: str) -> RunState:
    """Fill the learner from a checkpoint.

    Raises:
        CheckpointError: It belongs to another run, or is damaged.
    """
    state, table = read_state(path), read_table(path)
    if state.spec_digest != spec_digest:
        raise CheckpointError(
            f"{path}: written by a run with another spec (digest {state.spec_digest[:12]}, now {spec_digest[:12]}); "
            "give this run a run_dir of its own, or restore its run spec"
        )
    same_layout = table.get("layout") == _layout()
    boxes = weight_boxes(learner.chunks) + optimizer_boxes(learner.chunks, learner.optimizer)
    loaded = fill(path, boxes, [_random_object(None)] if same_layout else [])
    learner.optimizer.applied_steps = loaded[STEPS]
    if same_layout:
        _set_random_state(loaded["objects"][0])
    return state


def read_state(path: Path) -> RunState:
    """What a checkpoint says about its run. Raises CheckpointError if it is not one of ours."""
    table = read_table(path)
    try:
        return RunState(table["step"], table["spec_digest"], tuple(table["batch_digests"]))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {STATE_FILE} is not that of a run: {error!r}") from error


def _remove_unfinished(root: Path) -> None:
    for left_over in root.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(left_over)


def _layout() -> dict[str, Any]:
    """What must be the same for a rank to be the same rank again."""
    return {
        "ranks": dist.get_world_size(),
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_stages": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def _random_object(state: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),))


def _random_state() -> dict[str, Any]:
    tracker: Any = get_cuda_rng_tracker()
    return {"torch": torch.get_rng_state(), "tracker": tracker.get_states()}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(state["tracker"])
