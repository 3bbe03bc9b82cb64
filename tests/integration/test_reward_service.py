"""The reward service as a process of its own, over gRPC: hostile inputs, killed workers, a full queue, its end.

Nothing is faked. Workers are found in /proc as the descendants of the service.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc as pb_grpc
from services.common.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from services.common.rpc import call, open_channel
from tests.reward_service import START_S, running, slow_sums

TIMEOUT_S = 2.0
WORKERS = 2
VALUES = {"timeout": -0.5, "ungradable": -0.25, "error": -0.25}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with running(tmp_path_factory.mktemp("reward"), workers=WORKERS, timeout_s=TIMEOUT_S, values=VALUES) as started:
        yield started


@pytest.fixture
async def stub(service: tuple[subprocess.Popen[bytes], str]) -> AsyncIterator[pb_grpc.RewardServiceAsyncStub]:
    async with open_channel(service[1]) as channel:
        client = pb_grpc.RewardServiceStub(channel)
        await call(client.ListGraders, pb.ListGradersRequest(), timeout_s=5, patience_s=START_S)
        yield client


def item(answer: str, label: str) -> pb.GradeItem:
    return pb.GradeItem(response=f"<think>so</think> \\boxed{{{answer}}}", label=label)


def request(*items: pb.GradeItem, grader: str = "deepscaler") -> pb.GradeRequest:
    return pb.GradeRequest(run_id="rewards", grader=grader, items=items)


def descendants(pid: int) -> set[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found - {pid}


def grader_processes(pids: set[int]) -> set[int]:
    """The workers: what the server of forks has forked, which is itself a descendant of the service."""
    return {child for pid in pids for child in descendants(pid) if child in pids}


def busy_ones(pids: set[int]) -> set[int]:
    """Those that are on a processor or wait for one."""
    return {pid for pid in pids if state(pid) == "R"}


def state(pid: int) -> str:
    """As in ps(1); nothing if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_until(condition, what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.02)


async def test_verdicts_in_the_order_of_the_items(stub) -> None:
    items = [
        item("12", "12"),
        item("x(x+1)", "x^2+x"),
        item("x(x+2)", "x^2+x"),
        item("1", ""),
        pb.GradeItem(response="hm", label="1", truncated=True),
        pb.GradeItem(response="hm", label="1"),
    ]
    answer = await call(stub.Grade, request(*items), timeout_s=20)
    seen = [(one.verdict, one.value, one.reason) for one in answer.items]
    assert seen == [
        (pb.VERDICT_SCORED, 1.0, pb.VERDICT_REASON_CORRECT),
        (pb.VERDICT_SCORED, 1.0, pb.VERDICT_REASON_CORRECT),
        (pb.VERDICT_SCORED, 0.0, pb.VERDICT_REASON_WRONG),
        (pb.VERDICT_UNGRADABLE, -0.25, pb.VERDICT_REASON_UNSPECIFIED),
        (pb.VERDICT_SCORED, 0.0, pb.VERDICT_REASON_TRUNCATED),
        (pb.VERDICT_SCORED, 0.0, pb.VERDICT_REASON_NO_THINK_TAG),
    ]
    assert answer.grader_version


PWNED = "pwned-by-a-response"
HOSTILE = {
    "power tower": "9**9**9**9",
    "negative power tower": "9^-9^9",
    "factorial": "99999999!",
    "decimal exponent": "1e999999999",
    "falling factorial": "ff(9^9,9^8)",
    "nested powers": "(((x+y+1)^9)^9)^9",
    "slow sum": slow_sums(0)[0],
    "brackets": "(" * 20_000 + "x" + ")" * 20_000,
    "megabyte": "\\frac{1}{x} + " * 75_000,
    "megabyte of braces": "{}" * 500_000,
    "import": f"__import__('os').system('touch {PWNED}')",
    "exec": "exec('raise SystemExit')",
    "string product": "'a'*9**9",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_input_ends_in_time_and_leaves_its_neighbours_alone(stub, name: str) -> None:
    began = time.monotonic()
    items = [item("2", "2"), item(HOSTILE[name], "\\frac{x}{3}"), item("x+x", "2x")]
    answer = await call(stub.Grade, request(*items), timeout_s=30)
    assert time.monotonic() - began < TIMEOUT_S + 1
    assert [answer.items[0].value, answer.items[2].value] == [1.0, 1.0]
    assert answer.items[1].value <= 0


def test_no_code_of_a_response_ran() -> None:
    assert not Path(PWNED).exists()


async def test_a_deadline_that_passes_is_a_verdict(stub) -> None:
    answer = await call(stub.Grade, request(item(*slow_sums(1))), timeout_s=30)
    assert (answer.items[0].verdict, answer.items[0].value) == (pb.VERDICT_TIMEOUT, -0.5)
    assert answer.items[0].seconds == pytest.approx(TIMEOUT_S, abs=0.7)


async def test_killed_workers_are_replaced_and_their_questions_asked_again(service, stub) -> None:
    def workers() -> set[int]:
        return grader_processes(descendants(service[0].pid))

    await asyncio.to_thread(wait_until, lambda: len(workers()) == WORKERS, "workers that earlier tests cost")
    killed = workers()
    grading = asyncio.ensure_future(call(stub.Grade, request(item(*slow_sums(2)), item("x+x", "2x")), timeout_s=30))
    await asyncio.to_thread(wait_until, lambda: busy_ones(killed), "a worker to begin")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    verdicts = [one.verdict for one in (await grading).items]
    assert verdicts == [pb.VERDICT_TIMEOUT, pb.VERDICT_SCORED]
    await asyncio.to_thread(wait_until, lambda: len(workers()) == WORKERS, "new workers")
    assert not workers() & killed


async def test_a_cancelled_call_frees_its_worker(service, stub) -> None:
    def busy() -> set[int]:
        return busy_ones(descendants(service[0].pid))

    with pytest.raises(DeadlineExceeded):
        await call(stub.Grade, request(item(*slow_sums(3)), item(*slow_sums(4))), timeout_s=0.5)
    began = time.monotonic()
    answer = await call(stub.Grade, request(item("x+x", "2x")), timeout_s=30)
    assert answer.items[0].value == 1.0
    assert time.monotonic() - began < TIMEOUT_S - 0.5
    await asyncio.to_thread(wait_until, lambda: not busy(), "the abandoned workers to end")


async def test_bad_requests_name_the_field(stub) -> None:
    with pytest.raises(InvalidArgument, match="deepscaler"):
        await call(stub.Grade, request(item("1", "1"), grader="vibes"), timeout_s=5)
    with pytest.raises(InvalidArgument, match="1024"):
        await call(stub.Grade, request(*[item("1", "1")] * 1025), timeout_s=5)


async def test_graders_are_listed_with_their_digest(stub) -> None:
    answer = await call(stub.ListGraders, pb.ListGradersRequest(), timeout_s=5)
    assert {"deepscaler", "math"} <= {one.name for one in answer.graders}
    assert len(answer.graders[0].digest) == 64


async def test_a_full_queue_refuses_and_recovers(tmp_path: Path) -> None:
    with running(tmp_path, workers=1, max_queue=2, timeout_s=TIMEOUT_S) as (_, address):
        async with open_channel(address) as channel:
            client = pb_grpc.RewardServiceStub(channel)
            await call(client.ListGraders, pb.ListGradersRequest(), timeout_s=5, patience_s=START_S)
            slow = request(item(*slow_sums(5)), item(*slow_sums(6)))
            first = asyncio.ensure_future(call(client.Grade, slow, timeout_s=30))
            await asyncio.sleep(0.3)
            with pytest.raises(ResourceExhausted) as refused:
                await call(client.Grade, request(item("x+x", "2x")), timeout_s=5)
            assert refused.value.retry_after_s > 0
            integers = await call(client.Grade, request(item("7", "7")), timeout_s=5)
            assert integers.items[0].value == 1.0
            assert [one.verdict for one in (await first).items] == [pb.VERDICT_TIMEOUT] * 2
            after = await call(client.Grade, request(item("x+x", "2x")), timeout_s=30)
            assert after.items[0].value == 1.0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_is_left_after_the_end(tmp_path: Path, signum: signal.Signals) -> None:
    with running(tmp_path, workers=2, timeout_s=TIMEOUT_S) as (process, address):
        async with open_channel(address) as channel:
            client = pb_grpc.RewardServiceStub(channel)
            await call(client.ListGraders, pb.ListGradersRequest(), timeout_s=5, patience_s=START_S)
            children = descendants(process.pid)
            assert len(children) >= 3
            slow = asyncio.ensure_future(call(client.Grade, request(item(*slow_sums(7))), timeout_s=30))
            await asyncio.sleep(0.3)
            process.send_signal(signum)
            await asyncio.gather(slow, return_exceptions=True)
        code = await asyncio.to_thread(process.wait, 20)
        assert code == (0 if signum == signal.SIGTERM else -signal.SIGKILL)
        await asyncio.to_thread(
            wait_until, lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "all workers to end"
        )
