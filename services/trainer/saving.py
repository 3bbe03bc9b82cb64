"""Directories in Megatron's torch_dist format that all ranks write at once, and that appear whole.

    begin    rank 0 makes `.unfinished-NAME`; every rank copies what it owns to host memory
    thread   every rank writes its file, forces it to disk, and takes its SHA-256
    finish   every rank waits for all; rank 0 writes metadata and `state.json`, and renames

All ranks must share the file system. The thread knows neither torch.distributed nor CUDA, so training goes on beside
it. It is a thread, not Megatron's helper process: a fork is not safe in a process that serves gRPC, a spawned one
would get the whole state a second time, and a thread dies with its trainer, whatever kills that. A kill at any instant
leaves `.unfinished-NAME` or nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from services.common.run_checkpoints import STATE_FILE
from services.trainer.loading import FORMAT, CheckpointError, digest
from services.trainer.megatron import DEVICE, ShardedObject, ShardedTensor, dist_checkpointing
from services.trainer.ranks import on_first_rank, together

TEMPORARY_PREFIX = ".unfinished-"
WRITE_DEADLINE_S = 3600.0
"""A rank whose file is not on the disk by then is stuck."""
WRITE_POLL_S = 0.5
"""How soon ranks that wait for each other's files see them. They ask again and again: one that waited in a collective
would be held for one that stands still."""


class Saving:
    """One directory on its way to the disk. All ranks begin and finish it together, and no other one meanwhile."""

    def __init__(
        self,
        final: Path,
        boxes: Sequence[ShardedTensor],
        state: Mapping[str, Any],
        objects: Sequence[ShardedObject] = (),
        common: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy everything, and begin to write; the weights may change when this returns.

        Args:
            final: Directory to make; if it is there already, it stays as it is. What a killed save of it left goes.
            boxes: What this rank owns of the tensors.
            state: For `state.json`, beside what it needs to read the directory again; rank 0's is written.
            objects: Small things of this rank.
            common: Small things of all ranks; rank 0's are written.

        Raises:
            FailedPrecondition: The directory cannot be made.
        """
        self._final, self._state = final, state
        self._temporary = final.with_name(TEMPORARY_PREFIX + final.name)
        self._finalize: list[Callable[[], None]] = []
        self._writing: Future[dict[str, str]] | None = None
        self._deadline = time.monotonic() + WRITE_DEADLINE_S
        if on_first_rank(partial(_prepare, final, self._temporary)):
            return
        copies = [replace(box, data=_on_host(box.data)) for box in boxes]
        request: Any = dist_checkpointing.save(
            {"boxes": copies, "objects": list(objects), **(common or {})},
            str(self._temporary),
            validate_access_integrity=False,  # torch checks anyway that the boxes make whole tensors
            async_sharded_save=True,
            async_strategy="mcore",
        )
        self._finalize = request.finalize_fns
        writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing = writer.submit(_write, request, self._temporary, dist.get_rank())
        writer.shutdown(wait=False)

    def written(self, wait_s: float = 0.0) -> bool:
        """Whether every rank's part is on the disk, so that `finish` will not wait. All ranks ask together.

        Args:
            wait_s: How long to wait for this rank's own part.

        Raises:
            CheckpointError: One is not after WRITE_DEADLINE_S; on every rank.
        """
        is_done = self._writing is None or bool(wait([self._writing], wait_s).done)
        is_late = time.monotonic() > self._deadline
        everyone = torch.tensor(1 if is_done else -1 if is_late else 0, device=DEVICE)
        dist.all_reduce(everyone, dist.ReduceOp.MIN)
        if everyone < 0:
            raise CheckpointError(f"{self._final}: not on the disk after {WRITE_DEADLINE_S:.0f} s")
        return bool(everyone)

    def finish(self) -> Path:
        """Wait, and give the directory its name; it is final on disk when this returns, on every rank.

        Raises:
            FailedPrecondition: A rank could not write its part.
        """
        if self._writing is None:
            return self._final
        while not self.written(WRITE_POLL_S):
            pass
        everyone = together(self._writing.result)
        try:
            for finalize in self._finalize:
                finalize()
        except (CheckpointException, OSError) as error:
            why, free = str(error).strip().splitlines()[-1], shutil.disk_usage(self._temporary).free
            raise CheckpointError(f"{self._final}: not written, with {free:,} bytes free on its disk: {why}") from error
        files = {name: value for one in everyone for name, value in one.items()}
        on_first_rank(partial(_publish, self._temporary, self._final, self._state, files))
        return self._final


def _prepare(final: Path, temporary: Path) -> bool:
    """Make the directory to write to, unless the final one is there; whether it is."""
    if final.is_dir():
        return True
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return False


def _on_host(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to("cpu", copy=True)


def _write(request: Any, directory: Path, rank: int) -> dict[str, str]:
    """In the thread: write this rank's files, which Megatron forces to disk. Returns their digests by name."""
    if request.async_fn is not None:
        request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
    return {file.name: digest(file) for file in directory.glob(f"__{rank}_*")}


def _publish(temporary: Path, final: Path, state: Mapping[str, Any], files: Mapping[str, str]) -> None:
    """On rank 0, when all has been written: add what it wrote itself, force that to disk, rename."""
    own = [file for file in temporary.iterdir() if file.name not in files]
    digests = {**files, **{file.name: digest(file) for file in own}}
    table = {"format": FORMAT, **state, "files": digests}
    (temporary / STATE_FILE).write_text(json.dumps(table, indent=1))
    for path in (*own, temporary / STATE_FILE, temporary):
        sync(path)
    temporary.rename(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Force a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
