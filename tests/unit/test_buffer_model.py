"""Random lives of a run on the model of the ledger alone: its laws hold, and a fair schedule goes on from any state."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.ledger_machine import LedgerMachine, lives


@pytest.mark.timeout(900)  # to shrink a life that fails
def test_random_lives_keep_the_laws():
    run_state_machine_as_test(LedgerMachine, settings=lives(200, steps=300))
