"""Ends the processes of a supervisor that was killed: nothing of a run outlives its `flotilla up`.

Run as a program, it reads a pipe from standard input: `+GROUP` for each process group that has started, `-GROUP` for
each that has ended. Every process writes its own `+` line before it becomes what it is to be, and holds the pipe open
until then, so that there is no instant at which it could be missed. The pipe ends with the supervisor; groups that are
left then get SIGTERM, and after a grace SIGKILL. The one argument is the grace in seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Set

CHECK_EVERY_S = 0.1
"""Orphans are not our children, so that their end cannot be waited for."""
ENLIST_AND_RUN = ("/bin/sh", "-c", 'echo "+$$" >&0 && exec "$@" </dev/null', "sh")
"""Put before a command whose standard input is `Janitor.enlist_fd` and that starts in a session of its own."""


class Janitor:
    """The supervisor's side: the pipe, and the process at its other end."""

    def __init__(self, grace_s: float) -> None:
        # We hold the reading end too: should the janitor be killed, nobody who enlists gets SIGPIPE.
        self._read_fd, self.enlist_fd = os.pipe()
        argv = (sys.executable, "-m", "services.cli.janitor", str(grace_s))
        self._process = subprocess.Popen(argv, stdin=self._read_fd, start_new_session=True)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def discharge(self, group: int) -> None:
        """Nothing of the group is left."""
        os.write(self.enlist_fd, f"-{group}\n".encode())

    def dismiss(self) -> None:
        """The supervisor has ended everything itself; returns when the janitor has gone."""
        os.close(self.enlist_fd)
        self._process.wait()
        os.close(self._read_fd)


def remaining_groups(lines: Iterable[str]) -> set[int]:
    """Groups that are left when the lines end."""
    groups: set[int] = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    return groups


def signal_group(group: int, signum: int) -> bool:
    """Signal a process group, 0 only looks; False if the group is gone."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    return True


def end_groups(groups: Set[int], grace_s: float) -> None:
    """SIGTERM, and SIGKILL to what is left after the grace."""
    left = {group for group in groups if signal_group(group, signal.SIGTERM)}
    give_up = time.monotonic() + grace_s
    while left and time.monotonic() < give_up:
        time.sleep(CHECK_EVERY_S)
        left = {group for group in left if signal_group(group, 0)}
    for group in left:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    end_groups(remaining_groups(sys.stdin), grace_s=float(sys.argv[1]))
