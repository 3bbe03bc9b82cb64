"""One supervisor for a run: a lock file that also says who holds it."""

from __future__ import annotations

import fcntl
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = "supervisor.lock"


class LockHeld(RuntimeError):
    """Another supervisor runs this run."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__(f"the run in {path.parent} is up already, by process {pid}; end it with `flotilla down` first")
        self.pid = pid


@contextmanager
def supervisor_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run while the block runs. Raises LockHeld if another process does."""
    path = run_dir / LOCK_FILE
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld(path, _pid_in(path)) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def lock_holder(run_dir: Path) -> int | None:
    """Process id of the supervisor that runs this run now, if one does."""
    path = run_dir / LOCK_FILE
    if not path.is_file():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _pid_in(path)
    return None


def stop_supervisor(run_dir: Path, deadline_s: float) -> bool:
    """Ask the supervisor to stop the run and wait for its end; True if it ended in time.

    Raises:
        ProcessLookupError: No supervisor runs this run.
    """
    pid = lock_holder(run_dir)
    if not pid:
        raise ProcessLookupError(f"nothing runs in {run_dir}")
    handle = os.pidfd_open(pid)
    try:
        if lock_holder(run_dir) != pid:  # it ended before the handle was ours: the number may be another's now
            return True
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        readable, _, _ = select.select([handle], [], [], deadline_s)
        return bool(readable)
    finally:
        os.close(handle)


def _pid_in(path: Path) -> int:
    text = path.read_text().strip()
    return int(text) if text.isdigit() else 0
