"""Reads what services.trainer.saving wrote, in any layout, into the memory of model and optimizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from services.common.errors import FailedPrecondition
from services.common.run_checkpoints import STATE_FILE, why_no_checkpoint
from services.trainer.boxes import OPTIMIZER_PREFIX, weight_boxes
from services.trainer.megatron import (
    CheckpointingException,
    MegatronModule,
    ShardedObject,
    ShardedTensor,
    dist_checkpointing,
)
from services.trainer.ranks import all_ranks

FORMAT = 2
MTP_PREFIX = "mtp."
"""Of layers for multi-token prediction, which a run that does not train them leaves where they are."""


class CheckpointError(FailedPrecondition):
    """A checkpoint cannot be written or used; the message names it and says why."""


def read_table(path: Path) -> dict[str, Any]:
    """`state.json` of a directory. Raises CheckpointError if it is none of ours."""
    try:
        table = json.loads((path / STATE_FILE).read_text())
        if table["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {table['format']!r}, but this version reads format {FORMAT}")
        return {**table, "files": dict(table["files"])}
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(why_no_checkpoint(path)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {STATE_FILE} is damaged ({error!r}); not a usable checkpoint") from error


def fill(path: Path, boxes: Sequence[ShardedTensor], objects: Sequence[ShardedObject] = ()) -> dict[str, Any]:
    """Fill boxes from a directory; all ranks do it together. Returns `objects`, filled, and what all ranks share.

    Raises:
        CheckpointError: Damaged, or of another model; the same on every rank.
    """
    check_files(path)
    check_tensors(path, boxes)
    return read_boxes(path, boxes, objects)


def load_weights(path: Path, chunks: Sequence[MegatronModule]) -> None:
    """Fill a model alone, from a checkpoint of a run or from what `flotilla convert hf-to-torch-dist` wrote.

    Raises:
        CheckpointError: Damaged, or of another model; the message names directory and tensor.
    """
    fill(path, weight_boxes(chunks))


def read_boxes(path: Path, boxes: Sequence[ShardedTensor], objects: Sequence[ShardedObject] = ()) -> dict[str, Any]:
    """As `fill`, for one rank alone and without the checks."""
    wanted: Any = {"boxes": list(boxes), "objects": list(objects)}
    try:
        loaded: Any = dist_checkpointing.load(wanted, str(path), validate_access_integrity=False)
    except (CheckpointingException, OSError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
    return loaded


def check_files(path: Path) -> None:
    """Compare the files of a directory with its `state.json`, shared out among the ranks; all of them must call it.

    Raises:
        CheckpointError: A file is damaged or missing.
    """
    files = read_table(path)["files"]
    mine = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    damaged = all_ranks([name for name in mine if digest(path / name) != files[name]])
    if names := ", ".join(name for several in damaged for name in several):
        raise CheckpointError(f"{path}: damaged or missing: {names}; remove it to start from the one before")


def check_tensors(path: Path, boxes: Sequence[ShardedTensor]) -> None:
    """Compare the tensors of a directory with what all ranks together want; all of them must call it.

    Raises:
        CheckpointError: A tensor is missing, unknown, or of another shape; optimizer state may be left over, and layers
            for multi-token prediction.
    """
    wanted = {
        key: shape for one in all_ranks({box.key: box.global_shape for box in boxes}) for key, shape in one.items()
    }
    found = {key: one.global_shape for key, one in stored_tensors(path).items()}
    for key in sorted(wanted):
        if key not in found:
            hint = "; trainer.mtp_loss_scaling_factor = 0 trains without it" if key.startswith(MTP_PREFIX) else ""
            raise CheckpointError(f"{path}: {key} of the model is missing{hint}")
        if found[key] != wanted[key]:
            raise CheckpointError(f"{path}: {key} is {list(found[key])}, but that of the model is {list(wanted[key])}")
    spare = (OPTIMIZER_PREFIX, MTP_PREFIX)
    if unknown := sorted(key for key in found.keys() - wanted.keys() if not key.startswith(spare)):
        raise CheckpointError(f"{path}: {len(unknown)} tensors are unknown to the model, as {unknown[0]}")


def stored_tensors(path: Path) -> dict[str, ShardedTensor]:
    """Shape and dtype of each tensor of a directory, by name; without data."""
    found: Any = dist_checkpointing.load_tensors_metadata(str(path))
    return found


def digest(file: Path) -> str:
    """SHA-256 in hexadecimal; empty if the file cannot be read."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""
