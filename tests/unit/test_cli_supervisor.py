"""The supervisor with small shell and Python commands in the place of the services; the processes are real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.cli import supervisor as supervisor_module
from services.cli.processes import Process
from services.cli.restarts import RestartPolicy
from services.cli.supervisor import Outcome, Supervisor

DRIVER = """
import asyncio, json, sys
from pathlib import Path
from services.cli.processes import Process
from services.cli import supervisor

supervisor.STOP_GRACE_S = 2.0

async def main():
    table = [Process(name, tuple(argv)) for name, argv in json.loads(sys.argv[2]).items()]
    outcome = await supervisor.Supervisor(table, Path(sys.argv[1]), lambda text: print(text, flush=True)).run()
    sys.exit(outcome.exit_code)

asyncio.run(main())
"""


def shell(name: str, script: str, **settings) -> Process:
    return Process(name, ("/bin/sh", "-c", script), **settings)


def make(tmp_path: Path, *processes: Process, pause_s: float = 0.01) -> tuple[Supervisor, list[str]]:
    (tmp_path / "logs").mkdir(exist_ok=True)
    said: list[str] = []
    made = Supervisor(list(processes), tmp_path, said.append)
    for child in made.children.values():
        child.policy = RestartPolicy(pause_s=pause_s)
    return made, said


async def until(condition, deadline_s: float = 10.0) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true in time"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def numbers_in(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.is_file() else []


async def test_trainer_exit_zero_completes_the_run_and_stops_the_rest(tmp_path):
    pids = tmp_path / "pids"
    made, _ = make(
        tmp_path,
        shell("buffer", f"echo $$ >> {pids}; exec sleep 60"),
        shell("trainer", "sleep 0.3", restart="on-failure"),
    )
    outcome = await asyncio.wait_for(made.run(), 20)
    assert outcome == Outcome("complete", 0, "the run is complete")
    assert [alive(pid) for pid in numbers_in(pids)] == [False]


async def test_a_killed_process_is_started_again_and_its_log_goes_on(tmp_path):
    made, said = make(tmp_path, shell("buffer", "echo life $$; exec sleep 60"))
    run = asyncio.create_task(made.run())
    log = tmp_path / "logs" / "buffer.log"
    await until(lambda: log.is_file() and log.read_text().count("life") == 1)
    first = made.children["buffer"].pid
    assert first
    os.kill(first, signal.SIGKILL)
    await until(lambda: log.read_text().count("life") == 2)
    assert made.children["buffer"].restarts == 1
    assert any("buffer ended by signal 9" in line for line in said)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await asyncio.wait_for(run, 20)).exit_code == 0


async def test_a_fleet_lives_and_dies_together(tmp_path, monkeypatch):
    """Whoever dies first is blamed; the others are ended, by force if they must, and all start again together."""
    monkeypatch.setattr(supervisor_module, "STOP_GRACE_S", 0.5)
    monkeypatch.setattr(supervisor_module, "FLEET_GRACE_S", 0.2)
    lives = tmp_path / "lives"
    stubborn = f"trap '' TERM; echo $$ >> {lives}; sleep 60 & wait; wait"
    made, said = make(
        tmp_path,
        shell("trainer", f"echo $$ >> {lives}; exec sleep 60", fleet="trainer"),
        shell("trainer-1", stubborn, fleet="trainer"),
        shell("reward", "exec sleep 60"),
    )
    run = asyncio.create_task(made.run())
    await until(lambda: len(numbers_in(lives)) == 2)
    reward = made.children["reward"].pid
    os.kill(made.children["trainer"].pid or 0, signal.SIGKILL)
    await until(lambda: len(numbers_in(lives)) == 4, 30)
    assert [alive(pid) for pid in numbers_in(lives)[:2]] == [False, False]
    assert [made.children[name].restarts for name in ("trainer", "trainer-1", "reward")] == [1, 1, 0]
    assert made.children["reward"].pid == reward
    log = made.children["trainer"].log
    notice = f"trainer ended by signal 9 while starting (see {log}); starting it again in 0.01 s"
    assert [line for line in said if "ended by" in line] == [notice]
    made.end(Outcome("stopped", 0, "enough"))
    await asyncio.wait_for(run, 40)


async def test_exit_zero_of_a_service_is_no_end(tmp_path):
    made, _ = make(tmp_path, shell("reward", "true"), pause_s=0.05)
    run = asyncio.create_task(made.run())
    await until(lambda: made.children["reward"].restarts >= 2)
    made.end(Outcome("stopped", 0, "enough"))
    assert (await asyncio.wait_for(run, 20)).kind == "stopped"


async def test_a_crash_loop_ends_the_run_with_the_end_of_the_log(tmp_path):
    made, _ = make(tmp_path, shell("engine-0", "echo cannot load the weights >&2; exit 3"), shell("x", "exec sleep 60"))
    outcome = await asyncio.wait_for(made.run(), 30)
    assert outcome.kind == "failed" and outcome.exit_code == 1
    assert "engine-0 cannot run" in outcome.message and "exit code 3" in outcome.message
    assert str(tmp_path / "logs" / "engine-0.log") in outcome.detail
    assert "    cannot load the weights" in outcome.detail


async def test_bad_input_ends_the_run_at_once(tmp_path):
    made, _ = make(tmp_path, shell("trainer", "echo bad spec; exit 2", restart="on-failure"))
    outcome = await asyncio.wait_for(made.run(), 20)
    assert outcome.kind == "failed" and "refused its input" in outcome.message and "bad spec" in outcome.detail
    assert made.children["trainer"].restarts == 0


async def test_interrupt_gives_130(tmp_path):
    made, _ = make(tmp_path, shell("buffer", "exec sleep 60"))
    run = asyncio.create_task(made.run())
    await until(lambda: made.children["buffer"].pid is not None)
    os.kill(os.getpid(), signal.SIGINT)
    outcome = await asyncio.wait_for(run, 20)
    assert outcome.kind == "stopped" and outcome.exit_code == 130


async def test_waves_stop_in_order(tmp_path):
    order = tmp_path / "order"
    script = "trap 'echo {0} >> {1}; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    table = [shell(name, script.format(name, order), stop_wave=wave) for name, wave in (("c", 2), ("b", 1), ("a", 0))]
    made, _ = make(tmp_path, *table)
    run = asyncio.create_task(made.run())
    logs = [tmp_path / "logs" / f"{name}.log" for name in "abc"]
    await until(lambda: all(log.is_file() and "up" in log.read_text() for log in logs))
    made.end(Outcome("stopped", 0, "enough"))
    await asyncio.wait_for(run, 20)
    assert order.read_text().split() == ["a", "b", "c"]


async def test_who_ignores_sigterm_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "STOP_GRACE_S", 0.5)
    pids = tmp_path / "pids"
    stubborn = f"trap '' TERM; sleep 60 & echo $! $$ > {pids}; wait; wait; wait"
    made, said = make(tmp_path, shell("engine-0", stubborn))
    run = asyncio.create_task(made.run())
    await until(lambda: len(numbers_in(pids)) == 2)
    made.end(Outcome("stopped", 0, "enough"))
    await asyncio.wait_for(run, 20)
    assert not any(alive(pid) for pid in numbers_in(pids))
    assert "engine-0 did not stop in time; killing it" in said


async def test_children_of_a_dead_process_do_not_outlive_it(tmp_path):
    pids = tmp_path / "pids"
    made, _ = make(tmp_path, shell("engine-0", f"sleep 60 & echo $! >> {pids}; sleep 0.2; exit 1"), pause_s=5)
    run = asyncio.create_task(made.run())
    await until(lambda: bool(numbers_in(pids)) and made.children["engine-0"].pid is None)
    await until(lambda: not alive(numbers_in(pids)[0]), deadline_s=2)
    made.end(Outcome("stopped", 0, "enough"))
    await asyncio.wait_for(run, 20)


async def test_a_second_signal_does_not_wait(tmp_path):
    made, _ = make(tmp_path, shell("engine-0", "trap '' TERM; echo up; while :; do sleep 0.05; done"))
    run = asyncio.create_task(made.run())
    log = tmp_path / "logs" / "engine-0.log"
    await until(lambda: log.is_file() and "up" in log.read_text())
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(run, 20)
    assert time.monotonic() - began < supervisor_module.STOP_GRACE_S / 2


async def test_overrides_of_the_spec_are_not_handed_down(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOTILLA__DATA__PROMPT_DATA", "elsewhere.jsonl")
    monkeypatch.setenv("KEPT", "yes")
    made, _ = make(tmp_path, shell("trainer", "env", restart="on-failure", environment={"ADDED": "too"}))
    await asyncio.wait_for(made.run(), 20)
    seen = (tmp_path / "logs" / "trainer.log").read_text()
    assert "FLOTILLA__" not in seen and "KEPT=yes" in seen and "ADDED=too" in seen


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path, ignores_sigterm):
    (tmp_path / "logs").mkdir()
    pids = tmp_path / "pids"
    trap = "trap '' TERM; " if ignores_sigterm else ""
    script = f"{trap}sleep 300 & echo $! $$ >> {pids}; wait; wait"
    table = {name: ["/bin/sh", "-c", script] for name in ("redis", "engine-0")}
    command = [sys.executable, "-c", DRIVER, str(tmp_path), json.dumps(table)]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        asyncio.run(until(lambda: len(numbers_in(pids)) == 4, deadline_s=20))
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        everyone = {*numbers_in(pids), *(int(pid) for pid in children)}
        assert len(everyone) == 5  # two shells, their two children, the janitor
    finally:
        driver.kill()
        driver.wait(10)
    asyncio.run(until(lambda: not [pid for pid in everyone if alive(pid)]))


def processes_with(marker: str) -> list[int]:
    """Processes whose command line holds the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes() and alive(int(path.parent.name)):
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize("attempt", range(3))
def test_a_process_that_starts_at_the_instant_of_the_kill_is_not_missed(tmp_path, attempt):
    (tmp_path / "logs").mkdir()
    marker = f"{tmp_path}/marker"
    table = {f"engine-{index}": ["/bin/sh", "-c", f": {marker}; sleep 300; :"] for index in range(6)}
    command = [sys.executable, "-c", DRIVER, str(tmp_path), json.dumps(table)]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    asyncio.run(until((tmp_path / "logs" / f"engine-{2 * attempt}.log").exists, deadline_s=20))
    driver.kill()
    driver.wait(10)
    asyncio.run(until(lambda: not processes_with(marker)))
