"""An end with the end of the parent, for processes that must leave nothing behind (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal


def set_parent_death_signal(signum: signal.Signals) -> None:
    """Deliver `signum` to this process when the thread that started it ends; see prctl(2), PR_SET_PDEATHSIG."""
    pr_set_pdeathsig = 1
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)
