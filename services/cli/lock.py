"""One supervisor for a run."""

from __future__ import annotations

import os
import select
import signal
from contextlib import AbstractContextManager
from pathlib import Path

from services.common.lock import hold, holder

LOCK_FILE = "supervisor.lock"


def supervisor_lock(run_dir: Path) -> AbstractContextManager[None]:
    """Hold the run while the block runs. Raises LockHeld if another supervisor does."""
    return hold(run_dir / LOCK_FILE, "end it with `flotilla down` first")


def lock_holder(run_dir: Path) -> int | None:
    """Process id of the supervisor that runs this run now, if one does."""
    return holder(run_dir / LOCK_FILE)


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
