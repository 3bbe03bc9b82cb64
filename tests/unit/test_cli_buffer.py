"""`flotilla buffer` against a server in this process that answers from a script; there is no Redis and no buffer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from flotilla.common.v1 import common_pb2
from services.cli.buffer_tables import plain, spans_text
from services.cli.main import app
from services.common.rpc import duration
from tests.conftest import free_ports

GROUPS = 2500
FAILED = pb.GroupSummary(
    group_id="g00000007", state=pb.GROUP_STATE_FAILED, reason="CUDA out of memory", prompt_index=8, attempts=10,
    worker_id="gateway-0", batch=-1, oldest_step=-1,
)  # fmt: skip
STATS = pb.GetBufferStatsResponse(
    issued=1420,
    groups=[
        pb.StateCount(state=pb.GROUP_STATE_SCORED, count=0),
        pb.StateCount(state=pb.GROUP_STATE_KEPT, count=20),
        pb.StateCount(state=pb.GROUP_STATE_COMMITTED, count=1400),
        pb.StateCount(state=pb.GROUP_STATE_STALE, count=0),
    ],
    conserved=True,
    sealed_batches=12,
    committed_step=10,
    live_version=common_pb2.PolicyVersion(run_epoch=2, step=12),
    admission_credit=8,
    dropped={"zero_std_1.0": 30, "zero_std_0.0": 70},
    failed={"MAX_ATTEMPTS": 1},
    evaluation_issued=64,
    evaluation_groups=[pb.StateCount(state=pb.GROUP_STATE_SCORED, count=64)],
    evaluation_conserved=True,
    discarded_tokens={"RESTARTED": 4096},
    memory_bytes=900 << 20,
    memory_limit_bytes=1000 << 20,
    back_pressure=True,
    keep_rate=0.625,
    leases=4,
    lineage=1,
)


def sample(index: int, *spans: tuple[int, int, int]) -> common_pb2.Sample:
    return common_pb2.Sample(
        group_id="g00000003",
        sample_index=index,
        response_token_ids=[1] * spans[-1][2],
        policy_spans=[
            common_pb2.PolicySpan(begin=begin, end=end, version=common_pb2.PolicyVersion(run_epoch=1, step=step))
            for step, begin, end in spans
        ],
        finish_reason=common_pb2.FINISH_REASON_STOP,
    )


GROUP = pb.GetGroupResponse(
    summary=pb.GroupSummary(
        group_id="g00000003", state=pb.GROUP_STATE_KEPT, prompt_index=4, attempts=2, finished_samples=2, batch=-1,
        rewards=[1, 0.5], worker_id="gateway-0", oldest_step=4,
    ),
    samples=[sample(0, (4, 0, 30), (5, 30, 64)), sample(1, (5, 0, 9))],
    prompt="What is 6 x 7?",
    responses=["It is [bold]42[/bold].", "41\x1b[2J"],
    label="42",
    verdicts=["SCORED:CORRECT", "SCORED:WRONG"],
)  # fmt: skip


class ScriptedBuffer(buffer_pb2_grpc.BufferServiceServicer, registry_pb2_grpc.RunRegistryServiceServicer):
    """Answers what the constants say; remembers the requests."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.stats = STATS
        self.discrepancies: list[pb.Discrepancy] = []
        self.remaining = [2, 1, 0]

    def GetBufferStats(self, request, context):
        if request.run_id != "demo":
            context.abort(grpc.StatusCode.NOT_FOUND, f"this buffer serves run demo,\nnot {request.run_id}")
        return self.stats

    def ListGroups(self, request, context):
        self.requests.append(pb.ListGroupsRequest.FromString(request.SerializeToString()))
        if request.state == pb.GROUP_STATE_FAILED:
            return pb.ListGroupsResponse(groups=[FAILED] if request.kind == pb.WORK_KIND_TRAINING else [])
        start = int(request.page_token or 0)
        end = min(start + request.page_size, GROUPS)
        found = [pb.GroupSummary(group_id=f"g{n:08d}", state=pb.GROUP_STATE_KEPT, batch=-1) for n in range(start, end)]
        return pb.ListGroupsResponse(groups=found, next_page_token=str(end) if end < GROUPS else "")

    def GetGroup(self, request, context):
        if request.group_id != "g00000003":
            context.abort(grpc.StatusCode.NOT_FOUND, f"group {request.group_id} was never issued")
        return GROUP

    def ListLeases(self, request, context):
        lease = pb.LeaseSummary(
            group_id="g00000009", worker_id="gateway-0", kind=pb.WORK_KIND_TRAINING, attempt=1,
            expires_in=duration(17), partial_tokens=512, stop_reason=pb.STOP_REASON_SEALED,
        )  # fmt: skip
        lapsed = pb.LeaseSummary(group_id="g00000010", worker_id="gateway-1", expires_in=duration(-2))
        return pb.ListLeasesResponse(leases=[lapsed, lease])

    def AuditLedger(self, request, context):
        return pb.AuditLedgerResponse(groups=1420, batches=12, samples=160, discrepancies=self.discrepancies)

    def DrainWork(self, request, context):
        self.requests.append(request)
        return pb.DrainWorkResponse(remaining_leases=self.remaining.pop(0))

    def RewindRun(self, request, context):
        self.requests.append(request)
        if request.step >= 10:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"step {request.step} is not below the committed step 10"
            )
        return registry_pb2.RewindRunResponse(lineage=2, reissued_groups=96)


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture
def run_file(tmp_path, port) -> Path:
    path = tmp_path / "demo.toml"
    path.write_text(
        f'run_id = "demo"\nrun_dir = "{tmp_path}"\n[model]\nhf_checkpoint = "model"\n[data]\nprompt_data = "p.jsonl"\n'
        "[rollout]\nnum_rollout = 50\nrollout_batch_size = 2\nn_samples_per_prompt = 2\n"
        f"[services.buffer]\ngrpc_port = {port}\n"
    )
    return path


@pytest.fixture
def server(port) -> Iterator[ScriptedBuffer]:
    servicer = ScriptedBuffer()  # pyright: ignore[reportAbstractUsage]  what is not scripted is not called
    one = grpc.server(ThreadPoolExecutor(2))
    buffer_pb2_grpc.add_BufferServiceServicer_to_server(servicer, one)
    registry_pb2_grpc.add_RunRegistryServiceServicer_to_server(servicer, one)
    assert one.add_insecure_port(f"127.0.0.1:{port}") == port
    one.start()
    yield servicer
    one.stop(0).wait(5)


def flotilla(command: str, run_file: Path, *arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, ["buffer", command, str(run_file), *arguments], input=typed)


def test_stats_say_everything(server, run_file):
    done = flotilla("stats", run_file)
    assert done.exit_code == 0
    words = " ".join(done.output.split())
    for part in (
        "1420 issued · 12 batches sealed · committed 10 · live weights 12 (epoch 2) · lineage 1",
        "every group is accounted for", "KEPT 20 0", "COMMITTED 1,400 0", "SCORED 0 64", "issued 1,420 64",
        "admission credit 8 groups", "keep rate 62%", "900 MiB of 1000 MiB (90%); nearly full",
        "dropped 70 zero_std_0.0, 30 zero_std_1.0", "stale none", "failed 1 MAX_ATTEMPTS",
        "discarded tokens 4,096 RESTARTED",
    ):  # fmt: skip
        assert part in words, (part, words)


def test_a_ledger_that_does_not_add_up_says_so(server, run_file):
    server.stats = pb.GetBufferStatsResponse(issued=3, conserved=False, evaluation_conserved=True)
    assert "do not add up" in flotilla("stats", run_file).output


def test_groups_are_read_page_by_page_up_to_the_limit(server, run_file):
    done = flotilla("groups", run_file, "--state", "kept", "--limit", "2200")
    lines = done.output.splitlines()
    assert done.exit_code == 0 and len(lines) == 2201 and lines[-1].startswith("g00002199")
    assert [(one.page_size, one.page_token) for one in server.requests] == [(1000, ""), (1000, "1000"), (200, "2000")]
    assert {one.state for one in server.requests} == {pb.GROUP_STATE_KEPT}


def test_json_is_one_message(server, run_file):
    found = json.loads(flotilla("groups", run_file, "--kind", "evaluation", "--limit", "5000", "--json").output)
    assert len(found["groups"]) == GROUPS and found["groups"][0]["group_id"] == "g00000000"
    assert server.requests[0].kind == pb.WORK_KIND_EVALUATION
    assert json.loads(flotilla("stats", run_file, "--json").output)["back_pressure"] is True
    assert json.loads(flotilla("audit", run_file, "--json").output)["discrepancies"] == []


def test_show_has_text_rewards_verdicts_and_spans(server, run_file):
    done = flotilla("show", run_file, "g00000003")
    assert done.exit_code == 0
    for part in (
        "g00000003", "What is 6 x 7?", "row 4, label 42", "2, last by gateway-0", "It is [bold]42[/bold].",
        "41\\x1b[2J",
        "sample 0  ·  64 tokens  ·  reward 1  ·  SCORED:CORRECT  ·  STOP  ·  weights 1:4 [0,30) 1:5 [30,64)",
        "sample 1  ·  9 tokens  ·  reward 0.5  ·  SCORED:WRONG  ·  STOP  ·  weights 1:5 [0,9)",
    ):  # fmt: skip
        assert part in done.output, (part, done.output)


def test_leases_and_dead_letters(server, run_file):
    lines = [" ".join(line.split()) for line in flotilla("leases", run_file).output.splitlines()]
    assert lines[1:] == ["g00000010 gateway-1 0 0 0 lapsed", "g00000009 gateway-0 training 1 0 512 17 s SEALED"]
    lines = [" ".join(line.split()) for line in flotilla("dead-letters", run_file).output.splitlines()]
    assert lines[1:] == ["g00000007 8 10 gateway-0 CUDA out of memory"]


def test_audit_ends_with_1_if_something_does_not_add_up(server, run_file):
    done = flotilla("audit", run_file)
    assert done.exit_code == 0 and "1,420 training" in done.output and "everything adds up" in done.output
    server.discrepancies = [pb.Discrepancy(subject="g00000003", problem="is in KEPT and in READY")]
    done = flotilla("audit", run_file)
    assert done.exit_code == 1 and "g00000003  is in KEPT and in READY" in done.output


def test_drain_waits_until_nothing_is_left(server, run_file):
    done = flotilla("drain", run_file, "gateway-0")
    assert done.exit_code == 0
    assert done.output.splitlines() == [f"gateway-0 holds {left} leases" for left in (2, 1, 0)]
    assert len({one.request_id for one in server.requests}) == 3
    assert {one.worker_id for one in server.requests} == {"gateway-0"}


def test_drain_gives_up_after_its_time(server, run_file):
    assert flotilla("drain", run_file, "gateway-0", "--timeout", "0").exit_code == 1


def test_rewind_asks_first(server, run_file):
    done = flotilla("rewind", run_file, "--to-step", "4", typed="n\n")
    assert done.exit_code == 1 and server.requests == []
    done = flotilla("rewind", run_file, "--to-step", "4", "--yes")
    assert done.exit_code == 0 and "lineage 2: 96 groups are issued again" in done.output
    assert server.requests[0].step == 4 and server.requests[0].request_id
    done = flotilla("rewind", run_file, "--to-step", "10", "--yes")
    assert done.exit_code == 1 and done.stderr == "step 10 is not below the committed step 10\n"


@pytest.mark.parametrize("command", ["stats", "groups", "leases", "dead-letters", "audit"])
def test_a_buffer_that_is_away_is_one_line_on_stderr(run_file, port, command):
    done = flotilla(command, run_file)
    assert done.exit_code == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and f"no answer from the buffer at 127.0.0.1:{port}" in done.stderr


def test_what_the_buffer_refuses_is_one_line_on_stderr(server, run_file):
    done = flotilla("show", run_file, "g00000099")
    assert (done.exit_code, done.stderr) == (1, "group g00000099 was never issued\n")
    done = flotilla("stats", run_file, "--set", "run_id=other")
    assert (done.exit_code, done.stderr) == (1, "this buffer serves run demo, not other\n")


def test_bad_input_ends_with_2(server, run_file, tmp_path):
    done = flotilla("stats", tmp_path / "none.toml")
    assert done.exit_code == 2 and "none.toml" in done.stderr
    done = flotilla("groups", run_file, "--state", "LOST")
    assert done.exit_code == 2 and "WAITING" in done.stderr
    assert flotilla("groups", run_file, "--limit", "0").exit_code == 2
    assert server.requests == []


def test_spans():
    assert spans_text(sample(0, (4, 0, 3), (5, 3, 8)).policy_spans) == "1:4 [0,3) 1:5 [3,8)"


def test_text_of_a_model_cannot_take_over_the_terminal():
    out = StringIO()
    Console(file=out, force_terminal=True, no_color=True).print(plain("a\x1b]0;title\x07\rb\x9b2J\tc\nd"))
    assert (
        "\x1b]" not in out.getvalue() and "\x9b" not in out.getvalue() and "\\x1b]0;title\\x07\\x0db" in out.getvalue()
    )
