"""Kills in the middle of a run, and how long the run takes to get over each of them."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from random import Random

from tests.chaos.stack import PROCESSES, Stack

START_S = 240.0
"""A step takes a second; until the first one, eight processes load on two busy cores."""
RECOVERY_S = 240.0
END_S = 300.0
LONGEST_DELAY_S = 1.5
"""More than a rollout step takes, so that a kill may come in any phase of one."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a kill cost, in seconds from the kill on."""

    process: str
    step: int
    """Steps that were finished at the kill."""
    ready_s: float
    """Until the next life of the process was ready."""
    step_s: float
    """Until a rollout step had finished after that."""


def kill_each_once(stack: Stack, random: Random) -> list[Recovery]:
    """Kill every process once, in random order at random moments; the next only when a further step has finished."""
    wait_for_step(stack, 1)
    found = []
    for name in random.sample(PROCESSES, len(PROCESSES)):
        time.sleep(random.uniform(0, LONGEST_DELAY_S))
        found += kill_and_recover(stack, name)
    return found


def kill_and_recover(stack: Stack, *names: str) -> list[Recovery]:
    """Kill processes at the same moment, and wait until all are ready and a further step has finished."""
    begin, step = time.monotonic(), stack.rows()[-1]["step"]
    old, ready = set(stack.kill(*names)), dict[str, float]()

    def all_ready() -> bool:
        for name in names:
            if name not in ready and is_ready(stack, name, old):
                ready[name] = time.monotonic() - begin
        return len(ready) == len(names)

    stack.until(all_ready, RECOVERY_S, f"{', '.join(names)} ready again")
    count = len(stack.rows())
    stack.until(lambda: len(stack.rows()) > count, RECOVERY_S, f"a step after the death of {', '.join(names)}")
    step_s = time.monotonic() - begin
    return [Recovery(name, step, ready[name], step_s) for name in names]


def wait_for_step(stack: Stack, step: int) -> None:
    """Wait until a step has finished."""
    stack.until(lambda: any(row["step"] >= step for row in stack.rows()), START_S, f"step {step}")


def is_ready(stack: Stack, name: str, old: set[int]) -> bool:
    """Whether a process with another id than the old ones lives and is ready."""
    pid = stack.pids().get(name)
    if pid is None or pid in old:
        return False
    if name == "redis":
        return _listens(stack.case.redis_port)
    return bool(stack.statusz(name).get("ready"))


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def as_table(found: list[Recovery]) -> str:
    """The recoveries as a Markdown table."""
    lines = [f"| {one.process} | {one.step} | {one.ready_s:.1f} | {one.step_s:.1f} |" for one in found]
    head = ["| killed | after step | ready again (s) | next step finished (s) |", "|---|---|---|---|"]
    return "\n".join([*head, *lines])
