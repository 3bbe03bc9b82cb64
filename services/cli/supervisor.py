"""Keeps the processes of a run alive, and ends them all, in order, when the run ends.

    start ─► every process, in its own session, output appended to logs/<name>.log
      │
      ├─ one dies ──────────► what is left of its group and of its fleet is ended; started again after a pause, or
      │                       the run ends
      ├─ trainer exits 0 ───► the run is complete
      ├─ registry: STOPPED ─► the run is complete (the observer calls `end`)
      └─ SIGINT, SIGTERM ───► the run is stopped; a second signal does not wait
    end ──► wave by wave: SIGTERM, a grace, SIGKILL to the group

A supervisor that is killed cannot do the last step: the janitor does it then.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.cli.janitor import ENLIST_AND_RUN, Janitor, end_groups, signal_group
from services.cli.loading import EXIT_INTERRUPTED
from services.cli.processes import Process
from services.cli.restarts import GiveUp, RestartPolicy, describe_exit
from services.common.spec import ENV_PREFIX

STOP_GRACE_S = 15.0
FLEET_GRACE_S = 3.0
"""For the others of a fleet to say why they end too."""
ORPHANS_GRACE_S = 3.0
"""For what a process leaves behind: multiprocessing's resource tracker frees shared memory that a killed one held."""
LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 16 << 10
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run ended."""

    kind: Literal["complete", "stopped", "failed"]
    exit_code: int
    message: str
    detail: str = ""
    """For the end of the output: where to look, and what is there."""


COMPLETE = Outcome("complete", 0, "the run is complete")


@dataclass(slots=True)
class Child:
    """One process of the table, through all its lives."""

    process: Process
    log: Path
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    running: asyncio.subprocess.Process | None = None
    since_s: float = 0.0
    """Unix time of its last start."""
    started: bool = False
    """Whether it has finished its start; the observer sees it."""
    restarts: int = 0

    @property
    def pid(self) -> int | None:
        """Of the life it lives now; also its process group."""
        return self.running.pid if self.running else None


class Supervisor:
    """Runs a table of processes until one outcome. All methods belong to one event loop."""

    def __init__(self, processes: list[Process], run_dir: Path, notify: Callable[[str], None]) -> None:
        self.children = {one.name: Child(one, run_dir / "logs" / f"{one.name}.log") for one in processes}
        self._notify = notify
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._janitor = Janitor(STOP_GRACE_S)

    @property
    def janitor_pid(self) -> int:
        """Of the process that cleans up after us."""
        return self._janitor.pid

    def end(self, outcome: Outcome) -> None:
        """End the run; only the first outcome counts."""
        if not self._outcome.done():
            self._outcome.set_result(outcome)
            self._stopping.set()

    def end_if_failed(self, task: asyncio.Task[None]) -> None:
        """As a task's done callback: its error ends the run, and `run` raises it."""
        if not task.cancelled() and (error := task.exception()) and not self._outcome.done():
            self._outcome.set_exception(error)
            self._stopping.set()

    async def run(self) -> Outcome:
        """Start everything, wait for the outcome, stop everything."""
        with _on_signals(self._interrupted):
            try:
                for fleet in self._fleets():
                    keeping = asyncio.create_task(self._keep(fleet), name=fleet[0].process.name)
                    keeping.add_done_callback(self.end_if_failed)
                    self._tasks |= {child.process.name: keeping for child in fleet}
                outcome = await self._outcome
                self._notify(f"{outcome.message}; stopping")
            finally:
                await self._stop()
                self._janitor.dismiss()
        return outcome

    def _interrupted(self, signum: int) -> None:
        if self._outcome.done():
            self._hurry.set()
        code = EXIT_INTERRUPTED if signum == signal.SIGINT else 0
        self.end(Outcome("stopped", code, f"stopped by {signal.Signals(signum).name}"))

    # ------------------------------------------------------------------------------------------------ one process

    def _fleets(self) -> list[list[Child]]:
        """Processes that live and die together; most are alone."""
        fleets: dict[str, list[Child]] = {}
        for name, child in self.children.items():
            fleets.setdefault(child.process.fleet or name, []).append(child)
        return list(fleets.values())

    async def _keep(self, fleet: list[Child]) -> None:
        """Run the processes of a fleet again and again until the run ends."""
        while True:
            first, code = await self._live_together(fleet)
            if not self._stopping.is_set():
                pause_s = self._after_death(first, code)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
            if self._stopping.is_set():
                return
            for child in fleet:
                child.restarts += 1

    async def _live_together(self, fleet: list[Child]) -> tuple[Child, int]:
        """One life of a fleet; returns who ended first and its exit code, once nothing of the others is left."""
        lives = {asyncio.create_task(self._live(child)): child for child in fleet}
        ended, living = await asyncio.wait(lives, return_when=asyncio.FIRST_COMPLETED)
        first = next(iter(ended))
        if living and not self._stopping.is_set():
            await asyncio.wait(living, timeout=FLEET_GRACE_S)
        await asyncio.gather(*(self._end(lives[one], one) for one in living))
        return lives[first], first.result()

    def _after_death(self, child: Child, code: int) -> float:
        """Seconds until the next start; the run may end instead."""
        if code == 0 and child.process.restart == "on-failure":
            self.end(COMPLETE)
            return 0.0
        lived_s = time.time() - child.since_s
        verdict = child.policy.died(time.monotonic(), lived_s, code, started=child.started)
        if isinstance(verdict, GiveUp):
            self.end(_failure(child, verdict.why))
            return 0.0
        when = "" if child.started else f" while starting (see {child.log})"
        how = f"{child.process.name} ended {describe_exit(code)}{when}"
        self._notify(f"{how}; starting it again in {verdict.pause_s:g} s")
        return verdict.pause_s

    async def _live(self, child: Child) -> int:
        """One life of a process; returns its exit code once nothing of its group is left."""
        child.started = False
        with child.log.open("ab") as log:
            running = await asyncio.create_subprocess_exec(
                *ENLIST_AND_RUN,
                *child.process.argv,
                stdin=self._janitor.enlist_fd,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=_inherited_environment() | dict(child.process.environment),
                start_new_session=True,
            )
        child.running, child.since_s = running, time.time()
        if self._stopping.is_set():
            signal_group(running.pid, signal.SIGTERM)
        code = await running.wait()
        await asyncio.to_thread(end_groups, {running.pid}, ORPHANS_GRACE_S)
        child.running = None
        self._janitor.discharge(running.pid)
        return code

    # ----------------------------------------------------------------------------------------------------- the end

    async def _stop(self) -> None:
        for wave in sorted({child.process.stop_wave for child in self.children.values()}):
            ending = [child for child in self.children.values() if child.process.stop_wave == wave]
            await asyncio.gather(*(self._stop_child(child) for child in ending))

    async def _stop_child(self, child: Child) -> None:
        task = self._tasks.get(child.process.name)
        if not task:
            return
        await self._end(child, task)

    async def _end(self, child: Child, task: asyncio.Task[Any]) -> None:
        """End a process in order, or by force once the grace is over; `task` ends with it."""
        if child.pid:
            signal_group(child.pid, signal.SIGTERM)
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({task, hurry}, timeout=STOP_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if child.pid and not task.done():
            self._notify(f"{child.process.name} did not stop in time; killing it")
            signal_group(child.pid, signal.SIGKILL)
        await asyncio.wait({task})


def _inherited_environment() -> dict[str, str]:
    """Ours without overrides of the run spec: those are in the resolved spec, and paths must not be resolved twice."""
    # Threads that spin while they wait take the processors from the other services.
    return {"OMP_WAIT_POLICY": "PASSIVE"} | {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}


@contextmanager
def _on_signals(handle: Callable[[int], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signums = (signal.SIGINT, signal.SIGTERM)
    for signum in signums:
        loop.add_signal_handler(signum, handle, signum)
    try:
        yield
    finally:
        for signum in signums:
            loop.remove_signal_handler(signum)


def _failure(child: Child, why: str) -> Outcome:
    detail = f"The end of its log, {child.log}:\n{log_tail(child.log)}"
    return Outcome("failed", EXIT_FAILED, f"{child.process.name} cannot run: {why}", detail)


def log_tail(log: Path) -> str:
    """The last lines of a log, indented."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (it is empty)"
