"""kill -9 of every process of a run: it ends by itself, and no work is lost, repeated or trained twice.

Real Redis, vLLM and Megatron-core under `flotilla up`, nothing faked.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.chaos.laws import check_all
from tests.chaos.rounds import (
    END_S,
    RECOVERY_S,
    START_S,
    as_table,
    is_ready,
    kill_and_recover,
    kill_each_once,
    wait_for_step,
)
from tests.chaos.stack import PROCESSES, Stack, make_case, running

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def check_end(stack: Stack) -> None:
    assert stack.process.wait(END_S) == 0, stack.output.read_text()
    assert "the run is complete" in stack.output.read_text()
    check_all(stack)


@pytest.mark.nightly
def test_four_processes_at_once(tmp_path: Path) -> None:
    """Trainer, engine, Redis and a random other one die in the same moment."""
    case = make_case(tmp_path, num_rollout=6, save_interval=2)
    others = sorted(set(PROCESSES) - {"trainer", "engine-0", "redis"})
    with running(case) as stack:
        wait_for_step(stack, 3)
        print(as_table(kill_and_recover(stack, "trainer", "engine-0", "redis", Random(0).choice(others))))
        check_end(stack)


def test_the_trainer_at_the_worst_moments(tmp_path: Path) -> None:
    """In a save; trained and not acknowledged; acknowledged without hearing it; checkpoint final and not committed."""
    case = make_case(tmp_path, num_rollout=8, save_interval=2, optimizer_steps=4)
    checkpoints = case.run_dir / "checkpoints"
    with running(case) as stack:

        def is_saving() -> bool:
            """The last step; what a kill has left is of an older one."""
            return bool(rows := stack.rows()) and (checkpoints / f".unfinished-step-{rows[-1]['step']:08d}").is_dir()

        def is_training() -> bool:
            return stack.statusz("trainer").get("doing", "").startswith(("log-probs", "training"))

        def waits_for_ack() -> bool:
            return stack.waits_for("trainer", "note a trained batch")

        stack.until(is_saving, START_S, "a checkpoint is being written")
        recoveries = kill_and_recover(stack, "trainer")
        assert recoveries[0].step == 2

        stack.until(is_training, RECOVERY_S, "a batch is being trained")
        stack.kill("buffer")
        stack.until(waits_for_ack, RECOVERY_S, "the trainer acknowledges a batch to nobody")
        recoveries += kill_and_recover(stack, "trainer")

        stack.until(is_training, RECOVERY_S, "a batch is being trained")
        with stack.frozen("buffer"):
            stack.until(waits_for_ack, RECOVERY_S, "the trainer acknowledges a batch to a buffer that stands still")
            old = set(stack.kill("trainer"))
        stack.until(lambda: is_ready(stack, "trainer", old), RECOVERY_S, "the trainer is ready again")

        stack.until(is_saving, RECOVERY_S, "a checkpoint is being written")
        stack.kill("buffer")
        stack.until(lambda: stack.waits_for("trainer", "to commit"), RECOVERY_S, "the trainer commits to nobody")
        newest = int(max(checkpoints.glob("step-*")).name.removeprefix("step-"))
        assert newest >= stack.rows()[-1]["step"] - 1, "final on disk; a step may have been trained beside it"
        stack.kill("trainer")
        print(as_table(recoveries))
        check_end(stack)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1])
def test_each_process_once(tmp_path: Path, seed: int) -> None:
    """One after the other, in random order, at random moments of one run."""
    case = make_case(tmp_path, num_rollout=24, save_interval=3)
    with running(case) as stack:
        print(as_table(kill_each_once(stack, Random(seed))))
        check_end(stack)
