"""A directory that one process at a time may write to: a locked file, which also says who holds it.

The kernel lets go of the lock when the process ends, whatever ends it.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.errors import FailedPrecondition


class LockHeld(FailedPrecondition):
    """Another process holds the directory; the message names both."""


@contextmanager
def hold(path: Path, advice: str, what: Path | None = None) -> Iterator[None]:
    """Hold the directory of a lock file, or `what` it stands for, while the block runs.

    Raises:
        LockHeld: Another process does; the message ends with `advice`.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld(f"{what or path.parent} is in use by process {_named_in(path)}; {advice}") from None
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def holder(path: Path) -> int | None:
    """Process id of whoever holds the directory of a lock file now, if one does."""
    if not path.is_file():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(_named_in(path).split()[0])
    return None


def _named_in(path: Path) -> str:
    """Empty for an instant after the lock was taken; process 0 is nobody."""
    return path.read_text().strip() or "0"
