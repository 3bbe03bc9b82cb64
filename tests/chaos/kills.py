"""Kills at random instants of a run without a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tests.chaos.fleet import Fleet

VICTIMS = ("buffer", "redis", "rollout_gateway", "trainer")
ALL_VICTIMS = (*VICTIMS, "engine-0", "reward")
START_S = 60.0
RECOVERY_S = 60.0
LONGEST_PAUSE_S = 2.0
"""More than a step takes and less than the buffer needs to start, so that some are killed while they start."""
TWO_AT_ONCE = 0.25
"""Share of the kills that hit two processes."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a kill cost."""

    victims: tuple[str, ...]
    seconds: float
    """From the kill to the end of the next optimizer step."""


def storm(fleet: Fleet, random: Random, count: int, victims: Sequence[str] = VICTIMS) -> None:
    """Kill `count` processes, one or two at once, without waiting for anybody to be there again."""
    wait_for_step(fleet)
    while count > 0:
        fleet.wait(random.uniform(0, LONGEST_PAUSE_S))
        assert not fleet.is_complete, f"the run ended before {count} more kills"
        names = _choose(random, victims)[:count]
        fleet.kill(*names)
        count -= len(names)


def kill_and_recover(fleet: Fleet, random: Random, count: int, victims: Sequence[str]) -> list[Recovery]:
    """Kill `count` processes, one or two at once, and wait after each time for an optimizer step."""
    wait_for_step(fleet)
    found: list[Recovery] = []
    while (left := count - sum(len(one.victims) for one in found)) > 0:
        fleet.wait(random.uniform(0, LONGEST_PAUSE_S))
        assert not fleet.is_complete, f"the run ended before {left} more kills"
        found.append(_kill_and_wait(fleet, _choose(random, victims)[:left]))
    return found


def _kill_and_wait(fleet: Fleet, names: list[str]) -> Recovery:
    file, begin = fleet.case.trained_file, time.monotonic()
    size = file.stat().st_size
    fleet.kill(*names)
    fleet.until(
        lambda: file.stat().st_size > size or fleet.is_complete, RECOVERY_S, f"a step after the death of {names}"
    )
    return Recovery(tuple(names), time.monotonic() - begin)


def _choose(random: Random, victims: Sequence[str]) -> list[str]:
    return random.sample(victims, 2 if random.random() < TWO_AT_ONCE else 1)


def wait_for_step(fleet: Fleet) -> None:
    """Wait until a step has been trained."""
    fleet.until(fleet.case.trained_file.exists, START_S, "the first step")


def as_table(found: list[Recovery]) -> str:
    """Recoveries by victim as a Markdown table."""
    by_victim: dict[str, list[float]] = {}
    for one in found:
        by_victim.setdefault(" + ".join(sorted(one.victims)), []).append(one.seconds)
    lines = [
        f"| {victim} | {len(s)} | {statistics.median(s):.1f} | {max(s):.1f} |"
        for victim, s in sorted(by_victim.items(), key=lambda pair: (pair[0].count("+"), pair[0]))
    ]
    head = ["| killed | times | next step, median (s) | longest (s) |", "|---|---|---|---|"]
    return "\n".join([*head, *lines])
