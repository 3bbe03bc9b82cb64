"""What a grader's process may not do, enforced by the kernel (Linux)."""

from __future__ import annotations

import ctypes
import math
import resource
from typing import Final

MEMORY_BYTES: Final = 2 << 30
"""Address space; the libraries take about a third of it."""
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def leave_network() -> bool:
    """Move this process and its children into a network namespace with nothing in it; False if the system forbids it.

    With user namespaces nobody needs to be root for it, see unshare(2).
    """
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    return unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0 or unshare(CLONE_NEWNET) == 0


def dump_no_core() -> None:
    """Nothing is written when this process crashes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_to_computing() -> None:
    """This process writes no file and allocates no more than MEMORY_BYTES; unless it is root's, it starts no other."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def limit_cpu(seconds: float) -> None:
    """End this process once it has used so much more CPU time, rounded up, and a second."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = math.ceil(usage.ru_utime + usage.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
