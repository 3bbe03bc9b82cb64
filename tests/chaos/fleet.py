"""The real Redis, buffer, gateway and reward service as processes, with an engine and a trainer without models; or with
the real trainer, whose weights go to a stand-in.

    test ──► Fleet.until(condition): looks every few milliseconds, and starts again whatever was killed
                │
                ├─ died by SIGKILL ────► started again at once, on the same ports
                ├─ trainer exits 0 ────► the run is complete
                └─ died of itself ─────► the test fails, with the end of its log

The buffer runs as where torch is not installed: transformers then loads in one second instead of five.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.cli.processes import process_table
from tests.chaos.ledger_case import Case

WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
REAL = ("redis", "buffer", "reward", "rollout_gateway")
WITHOUT_MODEL = {"engine-0": "tests.chaos.engine", "trainer": "tests.chaos.trainer"}
WITH_MODEL = {"engine-0": "tests.chaos.engine", "weight_sync": "tests.chaos.weight_sync", "trainer": "services.trainer"}
"""Modules beside the real ones, by name of the process."""
STOP_WAVES = (("trainer", "weight_sync", "engine-0", "rollout_gateway", "reward"), ("buffer",), ("redis",))
STOP_S = 15.0
ORPHANS_S = 3.0
LOOK_EVERY_S = 0.01
MOST_LIVES = 200
"""Of one process: more than any test kills."""
LOG_TAIL_BYTES = 4000
REPOSITORY = Path(__file__).resolve().parents[2]


class Fleet:
    """The processes of a case. Whoever waits for something looks after them meanwhile."""

    def __init__(self, case: Case) -> None:
        self.case = case
        table = process_table(case.spec, case.run_file)
        modules = WITH_MODEL if case.family else WITHOUT_MODEL
        self._commands = {one.name: list(one.argv) for one in table if one.name in (*REAL, *modules)}
        self._commands["buffer"][1:3] = ["-c", WITHOUT_TORCH, "services.buffer"]
        for name, module in modules.items():
            self._commands[name][2] = module
        self._alive: dict[str, subprocess.Popen[bytes]] = {}
        self._groups: list[int] = []
        """Every process that ever lived; each led a process group of its own."""
        self.is_complete = False
        for name in self._commands:
            self._start(name)

    def kill(self, *names: str) -> None:
        """SIGKILL to each at once."""
        for name in names:
            self._alive[name].kill()

    def until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Wait, and start again whatever was killed; fails if the deadline passes first or something died of itself."""
        give_up = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < give_up, f"{what}: not within {deadline_s} s\n{self.logs()}"
            self._look()
            time.sleep(LOOK_EVERY_S)

    def wait(self, seconds: float) -> None:
        """Look after the processes for a while, or until the run is complete."""
        end = time.monotonic() + seconds
        self.until(lambda: self.is_complete or time.monotonic() > end, seconds + 1, "a pause")

    def until_complete(self, deadline_s: float) -> None:
        """Wait for the end of the run."""
        self.until(lambda: self.is_complete, deadline_s, "the end of the run")

    def logs(self) -> str:
        """The end of every log."""
        tails = ((path.stem, path.read_bytes()[-LOG_TAIL_BYTES:]) for path in self.case.folder.glob("*.log"))
        return "\n".join(f"=== {name}\n{tail.decode(errors='replace')}" for name, tail in sorted(tails))

    def stop(self) -> None:
        """End everything, in order."""
        for names in STOP_WAVES:
            wave = [self._alive[name] for name in names if name in self._alive]
            for process in wave:
                process.terminate()
            for process in wave:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
        give_up = time.monotonic() + ORPHANS_S
        while (left := list(filter(_lives, self._groups))) and time.monotonic() < give_up:
            time.sleep(LOOK_EVERY_S)
        for group in left:
            os.killpg(group, signal.SIGKILL)
        assert not left, f"these process groups did not end: {left}"

    def _start(self, name: str) -> None:
        environment = os.environ | {"FLOTILLA_KILL_POINTS": str(self.case.kill_points), "PYTHONUNBUFFERED": "1"}
        with (self.case.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                self._commands[name],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._alive[name] = process
        self._groups.append(process.pid)
        assert len(self._groups) < MOST_LIVES * len(self._commands), "processes die again and again"

    def _look(self) -> None:
        for name, process in list(self._alive.items()):
            code = process.poll()
            if code is None:
                continue
            del self._alive[name]
            if code == -signal.SIGKILL:
                self._start(name)
            else:
                assert (name, code) == ("trainer", 0), f"{name} died of itself, code {code}\n{self.logs()}"
                self.is_complete = True


@contextmanager
def running(case: Case) -> Iterator[Fleet]:
    """The case as a fleet; whatever happens inside, nothing of it is left."""
    fleet = Fleet(case)
    try:
        yield fleet
    finally:
        fleet.stop()


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
