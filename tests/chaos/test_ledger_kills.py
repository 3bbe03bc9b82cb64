"""kill -9 at random instants and at every kill point in the code: the ledger loses nothing and trains nothing twice.

Real Redis, buffer, gateway and reward service. Engine and trainer are processes without a model that keep their
contracts; weight_sync is left out (`tests.chaos.engine`, `tests.chaos.trainer`).
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.chaos.fleet import REPOSITORY, running
from tests.chaos.kills import ALL_VICTIMS, as_table, kill_and_recover, storm
from tests.chaos.ledger_case import Case, make_case
from tests.chaos.ledger_laws import check_all, steps_of
from tests.chaos.weights import load_newest

pytestmark = pytest.mark.timeout(300)

END_S = 180.0
LONG_END_S = 600.0
IN_ORDER: dict[str, Any] = {"seal_window": 1, "dynamic_sampling_filter": "nonzero_std"}
"""Generates and trains in turn and seals in the order of issue: nothing depends on when anything happens."""
INTERRUPTED: dict[str, Any] = {
    "partial_rollout": True,
    "over_sampling_batch_size": 6,
    "dynamic_sampling_filter": "nonzero_std",
}
"""Every seal interrupts what is left over."""
AHEAD: dict[str, Any] = {**INTERRUPTED, "max_staleness": 2}
"""Generates up to two batches ahead of the weights, which change under running requests."""


def rows_of(case: Case) -> list[tuple[str, ...]]:
    """Groups, positions and token content of every batch."""
    weights, _ = load_newest(case.spec.run_dir)
    return [one.rows for one in weights.batches]


def unhurt(folder: Path, num_rollout: int, rollout: dict[str, Any]) -> list[tuple[str, ...]]:
    """The batches of a run that nobody kills."""
    case = make_case(folder, num_rollout, **rollout)
    with running(case) as fleet:
        fleet.until_complete(LONG_END_S)
        check_all(case)
    assert len(steps_of(case)) == num_rollout
    return rows_of(case)


def test_ten_kills_change_no_batch(tmp_path: Path) -> None:
    """Sealed in the order of issue, a run that was hurt trains on the same tokens in the same order."""
    case = make_case(tmp_path / "hurt", 14, **IN_ORDER)
    with running(case) as fleet:
        storm(fleet, Random(1), 10)
        fleet.until_complete(END_S)
        states = check_all(case)
    assert set(states) == {"COMMITTED", "DROPPED"}
    assert rows_of(case) == unhurt(tmp_path / "unhurt", 14, IN_ORDER)


def test_ten_kills_ahead_of_the_weights(tmp_path: Path) -> None:
    case = make_case(tmp_path, 40, **AHEAD)
    with running(case) as fleet:
        storm(fleet, Random(2), 10)
        fleet.until_complete(END_S)
        print(check_all(case))


def test_every_kill_point(tmp_path: Path) -> None:
    """Whoever comes by a kill point for the first time dies there."""
    names = kill_points()
    case = make_case(tmp_path, 12, **INTERRUPTED)
    for name in names:
        (case.kill_points / name).touch()
    with running(case) as fleet:
        fleet.until_complete(END_S)
        check_all(case)
    assert sorted(path.name for path in case.kill_points.iterdir()) == []


def kill_points() -> set[str]:
    """All names in the code of the services."""
    sources = (REPOSITORY / "services").rglob("*.py")
    found = {name for path in sources for name in re.findall(r'kill_point\("(\w+)"\)', path.read_text())}
    assert found
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("rollout", "num_rollout"),
    [
        pytest.param(IN_ORDER, 200, id="in order"),
        pytest.param(INTERRUPTED, 200, id="interrupted"),
        pytest.param(AHEAD, 360, id="ahead"),
    ],
)
def test_sixty_kills(tmp_path: Path, rollout: dict[str, Any], num_rollout: int) -> None:
    """Of every process, one or two at once; the next only after the run has got over it."""
    case = make_case(tmp_path / "hurt", num_rollout, **rollout)
    with running(case) as fleet:
        recoveries = kill_and_recover(fleet, Random(3), 60, ALL_VICTIMS)
        fleet.until_complete(LONG_END_S)
        states = check_all(case)
    print(as_table(recoveries), states, sep="\n\n")
    if rollout is IN_ORDER:
        assert rows_of(case) == unhurt(tmp_path / "unhurt", num_rollout, rollout)
