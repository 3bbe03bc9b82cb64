"""One `flotilla up`: the supervisor, and beside it a loop that looks at the run, shows it and records what it takes."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from services.cli.observe import Observation, Observer
from services.cli.preflight import SHARED_MEMORY
from services.cli.processes import Process
from services.cli.procfs import group_memory, own_memory
from services.cli.records import ProcessRecord, SupervisorRecord
from services.cli.supervisor import COMPLETE, Outcome, Supervisor
from services.cli.table import Display
from services.cli.view import RunFiles, make_view
from services.common.spec import RunSpec

LOOK_EVERY_S = 1.0
MEASURE_EVERY_S = 5.0
"""Summing the memory of a large process takes tens of milliseconds."""


async def run_session(spec: RunSpec, processes: list[Process], display: Display) -> Outcome:
    """Run the processes until the run ends, and record how it went in supervisor.json."""
    supervisor = Supervisor(processes, spec.run_dir, display.event)
    session = Session(spec, processes, supervisor, display)
    watching = [asyncio.create_task(session.look()), asyncio.create_task(session.measure())]
    for task in watching:
        task.add_done_callback(supervisor.end_if_failed)
    outcome = Outcome("failed", 1, "the supervisor failed")
    try:
        outcome = await supervisor.run()
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        session.write_record(outcome.kind)
        free_shared_memory(spec)
    return outcome


def free_shared_memory(spec: RunSpec) -> None:
    """Remove the weights of trainers that were killed and not started again: they lie in the machine's memory."""
    for rank in range(len(spec.services.weight_agents)):
        (SHARED_MEMORY / f"flotilla-{spec.run_id}-rank{rank}").unlink(missing_ok=True)


class Session:
    """What is known about the run while it is up."""

    def __init__(self, spec: RunSpec, processes: list[Process], supervisor: Supervisor, display: Display) -> None:
        self._spec = spec
        self._processes = processes
        self._supervisor = supervisor
        self._display = display
        self._record = SupervisorRecord(started_at=time.time())
        self._memory: dict[str, int] = {}

    async def look(self) -> None:
        """Show the run again and again; end it when the registry says that it is stopped."""
        files = RunFiles(self._spec.run_dir)
        files.advance()  # what an earlier `up` of the run has shown
        async with Observer(self._spec, self._processes) as observer:
            while True:
                seen = await observer.look()
                self._note_started(seen)
                steps, evaluations = files.advance()
                view = make_view(self._spec, self._processes, seen, files, self._current_record("running"))
                self._display.update(view, steps, evaluations)
                if seen.ledger and seen.ledger.stopped:
                    self._supervisor.end(COMPLETE)
                await asyncio.sleep(LOOK_EVERY_S)

    def _note_started(self, seen: Observation) -> None:
        for name, answer in seen.answers.items():
            child = self._supervisor.children[name]
            child.started = child.started or bool(child.pid and answer and not answer.starting)

    async def measure(self) -> None:
        """Sum up the memory of the run again and again."""
        while True:
            pids = {name: child.pid for name, child in self._supervisor.children.items() if child.pid}
            memory = await asyncio.to_thread(group_memory, [*pids.values(), self._supervisor.janitor_pid])
            self._memory |= {name: memory[pid] for name, pid in pids.items() if memory[pid]}
            peak = max(self._record.peak_memory_bytes, sum(memory.values()) + own_memory())
            self._record = dataclasses.replace(self._record, peak_memory_bytes=peak)
            self.write_record("running")
            await asyncio.sleep(MEASURE_EVERY_S)

    def write_record(self, outcome: str) -> None:
        """Write supervisor.json as things stand."""
        self._current_record(outcome).write(self._spec.run_dir)

    def _current_record(self, outcome: str) -> SupervisorRecord:
        processes = {
            name: ProcessRecord(child.pid, child.started, child.restarts, self._memory.get(name, 0))
            for name, child in self._supervisor.children.items()
        }
        wall_seconds = time.time() - self._record.started_at
        return dataclasses.replace(self._record, wall_seconds=wall_seconds, outcome=outcome, processes=processes)
