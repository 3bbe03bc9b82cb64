"""vLLM's processes must not outlive ours."""

from __future__ import annotations

import signal

from services.common.service import set_parent_death_signal

SPAWNED_MAIN = "__mp_main__"
"""Name under which a process spawned by multiprocessing imports the main module, before it does anything else."""


def die_with_parent_if_spawned(module_name: str) -> None:
    """In a process that multiprocessing spawned, die at once when the parent does, even by SIGKILL.

    Args:
        module_name: `__name__` of the main module, which calls this at its top level.
    """
    if module_name == SPAWNED_MAIN:
        set_parent_death_signal(signal.SIGKILL)
