"""A plan carried out so that it can be killed at any instant and continued.

Invariant: a file that has its final name is complete and durable. Files of weights come first, each written under
another name, synced and renamed; then copies, the index and at last the config, without which nothing loads the
result. JOURNAL says what is being made; it goes when all is there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.folder import CONFIG, JOURNAL
from services.weight_sync.checkpoints.header import FileState
from services.weight_sync.checkpoints.plan import Conversion, NewShard, json_text
from services.weight_sync.checkpoints.writing import Advance, write_shard

UNFINISHED = ".unfinished"
"""Ends the name of a file that is being written."""


class _Stopped(Exception):
    """Another worker has failed, or the user has had enough."""


def convert(plan: Conversion, target: Path, workers: int, advance: Advance) -> None:
    """Carry out a conversion, or what is left of it. Whatever is raised, the same call continues it later.

    Args:
        plan: The conversion.
        target: Directory of the result.
        workers: Threads; each has a file of its own, and a few strips of a matrix in memory.
        advance: Called by the threads with what `left_bytes` counts.

    Raises:
        CheckpointError: Before anything is written: `target` is not empty and no part of this conversion, lies in the
            source, is being written by another process, or there is no room. Later: a weight is not finite, or a file
            cannot be written.
    """
    check_target(plan, target)
    target.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        check_target(plan, target)
        _write_file(target / JOURNAL, json_text(plan.identity))
        try:
            _write_shards(_what_is_left(plan, target), target, workers, advance)
            _finish(plan, target)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {target} keeps what is done, the same command continues") from None


def check_target(plan: Conversion, target: Path) -> None:
    """Raise CheckpointError if a conversion cannot be written to a directory."""
    try:
        source, resolved = plan.source.resolve(), target.resolve()
    except (OSError, RuntimeError):
        raise CheckpointError(f"{target} is a link to itself") from None
    if resolved == source or source in resolved.parents:
        raise CheckpointError(f"{target} is, or lies in, the source {plan.source}")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} exists and is not a directory")
    present = {path.name for path in target.iterdir()} if target.exists() else set()
    if JOURNAL in present:
        _check_same(plan, target)
    elif present - {JOURNAL + UNFINISHED}:
        raise CheckpointError(f"{target} is not empty")
    _check_room(plan, target)


def left_bytes(plan: Conversion, target: Path) -> int:
    """Bytes of weights that are still to be read."""
    return sum(shard.read_bytes for shard in _what_is_left(plan, target))


def _check_same(plan: Conversion, target: Path) -> None:
    """Raise CheckpointError, and say what differs, unless an unfinished conversion is this one."""
    wanted = json.loads(json_text(plan.identity))
    try:
        begun = json.loads((target / JOURNAL).read_bytes())
        differs = {key for key in wanted if begun[key] != wanted[key]}
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{target / JOURNAL} is damaged: what was begun there cannot be continued") from None
    if "options" in differs:
        raise CheckpointError(f"{target} was begun with other options: {json.dumps(begun['options'])}")
    if differs:
        raise CheckpointError(f"{target} was begun from another source, or {plan.source} has changed since")


def is_complete(plan: Conversion, target: Path) -> bool:
    """Whether a directory has the result, by its config and the headers of its files."""
    config = target / CONFIG
    same = config.is_file() and config.read_bytes() == plan.documents[CONFIG].encode()
    return same and not (target / JOURNAL).exists() and not _what_is_left(plan, target)


def _check_room(plan: Conversion, target: Path) -> None:
    existing = next(folder for folder in (target, *target.absolute().parents) if folder.exists())
    needed = sum(shard.size_bytes for shard in plan.shards if not _is_written(shard, target))
    needed += sum((plan.source / file).stat().st_size for file in plan.files)
    if needed > (free := shutil.disk_usage(existing).free):
        raise CheckpointError(f"{target} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")


def _is_written(shard: NewShard, target: Path) -> bool:
    file = target / shard.name
    if not file.is_file() or file.stat().st_size != shard.size_bytes:
        return False
    with file.open("rb") as stream:
        return stream.read(len(shard.header)) == shard.header


def _what_is_left(plan: Conversion, target: Path) -> list[NewShard]:
    return [shard for shard in plan.shards if not _is_written(shard, target)]


def _write_shards(shards: list[NewShard], target: Path, workers: int, advance: Advance) -> None:
    stop = threading.Event()

    def advance_unless_stopped(count: int) -> None:
        if stop.is_set():
            raise _Stopped
        advance(count)

    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(_write_shard, shard, target, advance_unless_stopped) for shard in shards]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _write_shard(shard: NewShard, target: Path, advance: Advance) -> None:
    _replace(target / shard.name, partial(write_shard, shard, advance=advance))


def _finish(plan: Conversion, target: Path) -> None:
    for file, state in plan.states.items():
        if FileState.of(file) != state:
            raise CheckpointError(f"{file} has changed since it was read")
    for file in plan.files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        _replace(target / file, partial(shutil.copy2, plan.source / file))
    for name, text in plan.documents.items():
        _write_file(target / name, text)
    (target / JOURNAL).unlink()
    _sync(target)


def _write_file(file: Path, text: str) -> None:
    _replace(file, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Let a file be written under another name, and give it its own when it is on the disk."""
    unfinished = file.with_name(file.name + UNFINISHED)
    try:
        unfinished.unlink(missing_ok=True)
        write(unfinished)
        _sync(unfinished)
        unfinished.replace(file)
        _sync(file.parent)
    except OSError as error:
        raise CheckpointError(f"{error.filename or file}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keep other processes from writing there. The lock goes with the process."""
    descriptor = os.open(target, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(f"{target} is being written by another process") from None
    try:
        yield
    finally:
        os.close(descriptor)
