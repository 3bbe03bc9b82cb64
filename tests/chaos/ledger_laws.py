"""What must hold after a run without a model that was hurt: by the buffer's own audit and by the trainer's weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import grpc

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import buffer_pb2_grpc
from tests.chaos.ledger_case import Case
from tests.chaos.weights import Weights, load_newest

CALL_S = 30.0
CARRIED = {"WAITING", "PARTIAL", "KEPT"}
"""Where surplus may rest at the end of a run that samples more than it trains on."""
AT_REST = {"COMMITTED", "DROPPED"}


def check_all(case: Case) -> Counter[str]:
    """Every law, on a fleet that lives and whose run is complete; returns the training groups by state."""
    weights, _ = load_newest(case.spec.run_dir)
    with grpc.insecure_channel(case.spec.services.buffer.grpc) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        check_audit(case, stub)
        states = check_groups(case, stub)
        check_batches(case, stub, weights)
    check_weights(case, weights)
    check_replays(case, weights)
    return states


def check_audit(case: Case, stub: buffer_pb2_grpc.BufferServiceStub) -> None:
    """The ledger does not contradict itself, and as many groups were trained as the run has places for."""
    audit = stub.AuditLedger(pb.AuditLedgerRequest(run_id=case.spec.run_id), timeout=CALL_S)
    assert [(one.subject, one.problem) for one in audit.discrepancies] == []
    rollout = case.spec.rollout
    assert audit.batches == rollout.num_rollout
    assert audit.committed_groups == rollout.num_rollout * rollout.rollout_batch_size


def check_groups(case: Case, stub: buffer_pb2_grpc.BufferServiceStub) -> Counter[str]:
    """Every issued group is somewhere; nothing is on its way, nothing failed, and without surplus nothing is left."""
    stats = stub.GetBufferStats(pb.GetBufferStatsRequest(run_id=case.spec.run_id), timeout=CALL_S)
    states = _by_name(stats.groups)
    assert stats.conserved and stats.issued == states.total()
    has_surplus = case.spec.rollout.over_sampling > case.spec.rollout.rollout_batch_size
    allowed = AT_REST | CARRIED | {"STALE"} if has_surplus or case.spec.rollout.max_staleness else AT_REST
    assert set(states) <= allowed, (states, stats.failed, stats.stale)
    if case.spec.rollout.partial_rollout:
        assert "RESTARTED" not in stats.discarded_tokens
    evaluated = _by_name(stats.evaluation_groups)
    assert stats.evaluation_conserved and stats.evaluation_issued == evaluated.total()
    assert set(evaluated) <= {"SCORED", "FAILED"}, evaluated
    return states


def _by_name(counts: Iterable[pb.StateCount]) -> Counter[str]:
    found = Counter({pb.GroupState.Name(one.state).removeprefix("GROUP_STATE_"): one.count for one in counts})
    return +found


def check_batches(case: Case, stub: buffer_pb2_grpc.BufferServiceStub, weights: Weights) -> None:
    """Every batch is committed once, and is what the last checkpoint contains."""
    request = pb.ListBatchesRequest(run_id=case.spec.run_id, page_size=1000)
    batches = stub.ListBatches(request, timeout=CALL_S).batches
    assert [one.batch for one in batches] == list(range(case.spec.rollout.num_rollout))
    assert {one.state for one in batches} == {pb.BATCH_STATE_COMMITTED}
    assert {one.commits for one in batches} == {1}
    assert [one.digest for one in batches] == [one.digest for one in weights.batches]


def check_weights(case: Case, weights: Weights) -> None:
    """Every group was trained on once, with all of its samples."""
    rollout = case.spec.rollout
    assert weights.step == rollout.num_rollout
    trained = Counter(row.split("/")[0] for one in weights.batches for row in one.rows)
    assert len(trained) == rollout.num_rollout * rollout.rollout_batch_size
    assert set(trained.values()) == {rollout.n_samples_per_prompt}


def check_replays(case: Case, weights: Weights) -> None:
    """A step that a kill took back was repeated with the same batch, and epochs never go back."""
    steps = steps_of(case)
    for one in steps:
        kept = weights.batches[one["batch"]]
        assert (one["digest"], tuple(one["rows"])) == (kept.digest, kept.rows), f"batch {one['batch']} changed"
    epochs = [one["run_epoch"] for one in steps]
    assert epochs == sorted(epochs)
    assert len({(one["run_epoch"], one["batch"]) for one in steps}) == len(steps)


def steps_of(case: Case) -> list[dict[str, Any]]:
    """Optimizer steps in the order in which they happened, those that a kill took back too."""
    return [json.loads(line) for line in case.trained_file.read_text().splitlines()]
