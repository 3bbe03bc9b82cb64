"""kill -9 of the trainer at random moments: the run trains on the same samples, to the same bits, as one left alone.

The real trainer on a tiny model, the real Redis, buffer, gateway and reward service; an engine without a model answers,
and weights go no further than a stand-in for weight_sync (tests.chaos.weight_sync).
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from safetensors.torch import load_file

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc
from services.trainer.metrics import STEP_METRICS
from tests.chaos.fleet import running
from tests.chaos.ledger_case import Case, make_case
from tests.chaos.ledger_laws import CALL_S, check_audit
from tests.chaos.moments import Moment, as_table, kill_at_random, metrics_of
from tests.chaos.stack import read_rows
from tests.chaos.weight_sync import PUBLISHED
from tests.trainer_stage import assert_same, content_of

pytestmark = [pytest.mark.stack, pytest.mark.nightly, pytest.mark.timeout(1800)]

END_S = 600.0
OF_TIME = ("train/seconds", "train/tokens_per_second", "train/slowest_rank")
EXACT = [
    *(name for name in STEP_METRICS if name.startswith("train/") and name not in OF_TIME),
    "rollout/mean_response_tokens",
    "rollout/packing_efficiency",
]
"""What no two runs may differ in."""
IN_ORDER: dict[str, Any] = {"seal_window": 1, "dynamic_sampling_filter": "nonzero_std", "max_response_tokens": 128}
"""Batches are sealed in the order of issue: nothing depends on when anything happens."""


def batches_of(case: Case) -> list[list[str]]:
    """The groups of every batch in their order, which all are committed once, by a ledger without contradictions."""
    with grpc.insecure_channel(case.spec.services.buffer.grpc) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        check_audit(case, stub)
        request = buffer_pb2.ListBatchesRequest(run_id=case.spec.run_id, page_size=1000)
        batches = stub.ListBatches(request, timeout=CALL_S).batches
    assert {(one.state, one.commits) for one in batches} == {(buffer_pb2.BATCH_STATE_COMMITTED, 1)}
    newest = case.spec.run_dir / "checkpoints" / f"step-{len(batches):08d}"
    assert json.loads((newest / "state.json").read_text())["batch_digests"] == [one.digest for one in batches]
    return [list(one.group_ids) for one in batches]


def steps_of(case: Case) -> dict[int, list[Any]]:
    """The numbers of every step; whenever a step was repeated they were the same."""
    found: dict[int, list[Any]] = {}
    for row in metrics_of(case):
        numbers = [row[name] for name in EXACT]
        assert found.setdefault(row["step"], numbers) == numbers, f"step {row['step']} was not repeated alike"
    return found


def published_by(case: Case) -> dict[int, str]:
    """SHA-256 of the weights of every step as an agent reads them; in every epoch the same."""
    found: dict[int, str] = {}
    for row in read_rows(case.spec.run_dir / PUBLISHED):
        assert found.setdefault(row["step"], row["digest"]) == row["digest"], f"other weights at step {row['step']}"
    return found


def run(case: Case, kills: int = 0, seed: int = 0) -> tuple[list[list[str]], list[Moment]]:
    """A run to its end. Returns the groups of its batches, and when its trainer was killed."""
    with running(case) as fleet:
        random = Random(seed)
        moments = [kill_at_random(fleet, random) for _ in range(kills)]
        fleet.until_complete(END_S)
        return batches_of(case), moments


@pytest.mark.parametrize(
    ("family", "kills", "num_rollout"),
    [pytest.param("qwen3", 14, 50, id="dense"), pytest.param("deepseek_v3", 6, 30, id="experts")],
)
def test_kills_of_the_trainer_change_no_bit(tmp_path: Path, family: str, kills: int, num_rollout: int) -> None:
    hurt, whole = (make_case(tmp_path / name, num_rollout, family=family, **IN_ORDER) for name in ("hurt", "whole"))
    batches, moments = run(hurt, kills, seed=kills)
    print("", as_table(moments), sep="\n")
    assert len(moments) == kills
    assert batches == run(whole)[0]
    expected = steps_of(whole)
    assert [*expected] == [*range(1, num_rollout + 1)]
    assert steps_of(hurt) == expected
    assert published_by(hurt) == published_by(whole)
    assert content_of(hurt.spec.run_dir) == content_of(whole.spec.run_dir)
    assert_same(*(load_file(one.spec.run_dir / "hf" / "model.safetensors") for one in (hurt, whole)))
