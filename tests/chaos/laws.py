"""What must hold after a run that was hurt, read from its files and its Redis without any code of the services."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from tests.chaos.stack import PROC, Case, Row, Stack, read_rows
from tests.redis_server import RedisServer

STATES = (
    "WAITING", "GENERATING", "PARTIAL", "GENERATED", "SCORED", "KEPT", "READY", "IN_TRAINING", "TRAINED",
    "COMMITTED", "DROPPED", "STALE", "FAILED",
)  # fmt: skip
REPEATABLE = ("train/entropy", "train/log_prob_gap_mean", "train/grad_norm", "rollout/mean_response_tokens")
"""With one thread these depend on nothing but a batch and the weights before it."""


class Ledger:
    """What Redis holds about a run, by the names of its keys."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._prefix = client, f"flotilla:{{{run_id}}}:"

    def hash(self, name: str) -> dict[str, str]:
        """All fields of a hash."""
        return self._client.hgetall(self._prefix + name)

    def number(self, name: str) -> int:
        """A number among the facts of the run."""
        return int(self.hash("run").get(name, 0))

    def groups(self, kind: str) -> dict[str, set[str]]:
        """Groups by state; `kind` is train or eval."""
        return {state: set(self._client.zrange(f"{self._prefix}{kind}:{state}", 0, -1)) for state in STATES}

    def batches(self) -> list[dict[str, str]]:
        """Every sealed batch, in order."""
        return [self.hash(f"batch:{number}") for number in range(self.number("sealed"))]


@contextmanager
def open_ledger(case: Case) -> Iterator[Ledger]:
    """The ledger of a run that has ended, in a Redis of its own."""
    server = RedisServer(case.run_dir / "redis")
    client = redis.Redis(
        port=server.port,
        decode_responses=True,
        encoding_errors="replace",  # manifests are bytes, and not looked at
        socket_timeout=10,
        retry=Retry(ConstantBackoff(0.1), 50),
        retry_on_error=[redis.BusyLoadingError],
    )
    try:
        yield Ledger(client, case.run_id)
    finally:
        client.close()
        server.stop()


def check_all(stack: Stack) -> None:
    """Every law, after `flotilla up` has ended with the run complete."""
    case = stack.case
    check_nothing_left(case, stack.shared_memory)
    with open_ledger(case) as ledger:
        check_groups(case, ledger)
        check_batches(case, ledger)
        check_evaluations(case, ledger)
    check_metrics(case)
    check_weight_sync(case)


def check_groups(case: Case, ledger: Ledger) -> None:
    """Every issued group is in exactly one state, at rest, and in the batch that trained on it or in none."""
    states = ledger.groups("train")
    every = [group for groups in states.values() for group in groups]
    assert sorted(every) == [f"g{number:08d}" for number in range(ledger.number("issued"))]
    assert {state for state, groups in states.items() if groups} == {"COMMITTED"}
    trained = [group for batch in ledger.batches() for group in batch["groups"].split()]
    assert sorted(trained) == sorted(states["COMMITTED"])
    assert len(trained) == case.num_rollout * case.batch_size


def check_batches(case: Case, ledger: Ledger) -> None:
    """Every batch is committed once, and the last checkpoint contains the same batches in the same order."""
    batches = ledger.batches()
    assert [batch["state"] for batch in batches] == ["COMMITTED"] * case.num_rollout
    assert [batch["commits"] for batch in batches] == ["1"] * case.num_rollout
    digests = [batch["digest"] for batch in batches]
    assert len(set(digests)) == case.num_rollout
    assert ledger.number("committed_step") == case.num_rollout
    newest = max((case.run_dir / "checkpoints").glob("step-*"))
    assert newest.name == f"step-{case.num_rollout:08d}"
    assert json.loads((newest / "state.json").read_text())["batch_digests"] == digests


def check_evaluations(case: Case, ledger: Ledger) -> None:
    """Every evaluation group is in exactly one state, and each due evaluation was issued once and has ended."""
    states = ledger.groups("eval")
    every = [group for groups in states.values() for group in groups]
    assert len(every) == len(set(every)) == ledger.number("eval_issued")
    assert {state for state, groups in states.items() if groups} <= {"SCORED", "FAILED"}
    due = {0, *range(0, case.num_rollout + 1, case.evaluated_steps), case.num_rollout}
    assert {int(ledger.hash(f"group:{group}")["step"]) for group in every} == due


def check_metrics(case: Case) -> None:
    """Every step has its row, epochs never go back, and a step that was repeated did the same again."""
    rows = read_rows(case.run_dir / "metrics.jsonl")
    last = {row["step"]: row for row in rows}
    assert sorted(last) == list(range(1, case.num_rollout + 1))
    epochs = [last[step]["run_epoch"] for step in sorted(last)]
    assert epochs == sorted(epochs)
    assert len({(row["run_epoch"], row["step"]) for row in rows}) == len(rows)
    for row in rows:
        assert _repeatable(row) == _repeatable(last[row["step"]]), f"step {row['step']} was not repeated alike"


def _repeatable(row: Row) -> Row:
    return {name: row[name] for name in REPEATABLE}


def check_weight_sync(case: Case) -> None:
    """Engines got what was sent, and the weights of a step are the same in every epoch that reached it."""
    rows = read_rows(case.run_dir / "weight_sync.jsonl")
    assert rows
    for row in rows:
        assert row["equal"] and row["receiver_digests"] == [row["sender_digest"]] * len(row["engines"])
    by_step: dict[int, set[str]] = {}
    for row in rows:
        by_step.setdefault(row["step"], set()).add(row["sender_digest"])
    assert {step: len(digests) for step, digests in by_step.items()} == dict.fromkeys(range(case.num_rollout + 1), 1)
    assert len(set.union(*by_step.values())) == case.num_rollout + 1


def check_nothing_left(case: Case, shared_memory: set[Path]) -> None:
    """No process names the run or its Redis, no port is taken, no shared memory is left."""
    own = (str(case.run_dir / "run.toml"), f"redis-server 127.0.0.1:{case.redis_port}")
    assert [command for command in _commands() if any(one in command for one in own)] == []
    for port in case.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    assert [path for path in shared_memory if path.exists()] == []


def _commands() -> Iterator[str]:
    for path in PROC.glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
