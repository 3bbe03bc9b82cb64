"""Memory of process groups, from Linux's /proc."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
KIB = 1024
GROUP_FIELD = 2
"""Of /proc/PID/stat, counted after the parenthesised command: state, parent, process group; see proc(5)."""


def group_memory(groups: Iterable[int]) -> dict[int, int]:
    """Bytes of memory by process group, all members together.

    Shared pages are split between those who share them (PSS), so that the groups add up to what the run takes.
    """
    memory = dict.fromkeys(groups, 0)
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (group := _process_group(entry)) in memory:
            memory[group] += _proportional_set_size(entry)
    return memory


def own_memory() -> int:
    """Bytes of memory of this process."""
    return _proportional_set_size(PROC / "self")


def _process_group(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[GROUP_FIELD])
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return 0


def _proportional_set_size(entry: Path) -> int:
    try:
        for line in (entry / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * KIB
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it ended meanwhile, or changed its user
        return 0
    return 0
