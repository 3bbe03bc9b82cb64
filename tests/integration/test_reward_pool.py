"""The worker pool with real processes: deadlines, kills, cancellation, the cache, limits. Nothing is faked.

The functions at the end are graders that run in workers; the pool finds them by this module's name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from benchmarks.reward import soak
from services.reward.pool import WorkerPool
from services.reward.verdicts import Graded, Question, Reason, Verdict
from services.reward.worker import Decide

TIMEOUT_S = 1.0
SLACK_S = 0.1
LOADER = f"{__name__}:grader"


@asynccontextmanager
async def running(size: int = 2, *, network: bool = False, cache_size: int = 0) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(size, TIMEOUT_S, 100, network=network, loader=LOADER, cache_size=cache_size)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.stop()


async def ask(pool: WorkerPool, grader: str, answer: str = "") -> Graded:
    return await pool.ask(grader, Question(answer, ""))


async def full(pool: WorkerPool, size: int = 2) -> float:
    """Seconds until all workers run again."""
    began = time.monotonic()
    async with asyncio.timeout(10):
        while pool.alive < size:  # noqa: ASYNC110  nobody but this test waits for it
            await asyncio.sleep(0.005)
    return time.monotonic() - began


async def test_a_hang_ends_at_its_deadline_and_delays_no_neighbour() -> None:
    async with running() as pool:
        began = time.monotonic()
        hang = asyncio.create_task(ask(pool, "hang"))
        delays = []
        while not hang.done():
            sent = time.monotonic()
            assert (await ask(pool, "right")).reason is Reason.CORRECT
            delays.append(time.monotonic() - sent)
        assert (await hang).verdict is Verdict.TIMEOUT
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        assert await full(pool) < 1
        assert sorted(delays)[len(delays) * 99 // 100] < 0.05


async def test_all_workers_killed_at_once_are_back_within_a_second() -> None:
    async with running(4) as pool:
        pids = {int((await ask(pool, "pid")).value or 0) for _ in range(40)}
        asking = asyncio.gather(*(ask(pool, "wait") for _ in range(4)))
        await asyncio.sleep(0.1)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert [one.reason for one in await asking] == [Reason.CORRECT] * 4
        assert await full(pool, 4) < 1


@pytest.mark.parametrize("end", ["exit", "crash", "raise", "memory", "nonsense", "garbage"])
async def test_a_grader_that_fails_is_an_error_within_the_deadline(end: str) -> None:
    async with running() as pool:
        began = time.monotonic()
        assert (await ask(pool, end)).verdict is Verdict.ERROR
        assert time.monotonic() - began < TIMEOUT_S + SLACK_S
        assert (await ask(pool, "right")).reason is Reason.CORRECT
        assert await full(pool) < 1


async def test_a_child_that_a_grader_forks_answers_nobody() -> None:
    async with running(1, network=True) as pool:
        for value in range(5):
            await ask(pool, "fork")
            assert (await ask(pool, "echo", str(value))).value == value


async def test_no_answer_is_a_timeout_because_this_process_was_held_up() -> None:
    async with running(1, cache_size=100) as pool:
        asked = asyncio.create_task(ask(pool, "wait"))
        await asyncio.sleep(0.1)
        time.sleep(TIMEOUT_S + 0.5)  # noqa: ASYNC251  as if the process had been stopped
        assert (await asked).reason is Reason.CORRECT


async def test_idle_workers_that_die_are_replaced_before_anybody_asks() -> None:
    async with running() as pool:
        pids = {int((await ask(pool, "pid")).value or 0) for _ in range(20)}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert await full(pool) < 1
        assert not pids & {int((await ask(pool, "pid")).value or 0) for _ in range(20)}


async def test_a_cancelled_question_frees_its_worker() -> None:
    async with running(1) as pool:
        hang = asyncio.create_task(ask(pool, "hang"))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        hang.cancel()
        assert (await ask(pool, "right")).reason is Reason.CORRECT
        assert time.monotonic() - began < 0.5


async def test_a_template_that_was_killed_is_started_again() -> None:
    async with running() as pool:
        os.kill(int((await ask(pool, "parent")).value or 0), signal.SIGKILL)
        async with asyncio.timeout(20):
            assert (await ask(pool, "right")).reason is Reason.CORRECT
        assert await full(pool) < 5


async def test_answers_and_timeouts_are_remembered_and_errors_are_not() -> None:
    async with running(cache_size=100) as pool:
        first, again = [await ask(pool, "pid", "a") for _ in range(2)]
        assert (first.value, again.seconds) == (again.value, 0.0)
        assert (await ask(pool, "hang")).verdict is Verdict.TIMEOUT
        began = time.monotonic()
        assert (await ask(pool, "hang")).verdict is Verdict.TIMEOUT
        assert time.monotonic() - began < 0.05
        failed = [await ask(pool, "raise") for _ in range(2)]
        assert all(one.verdict is Verdict.ERROR and one.seconds > 0 for one in failed)


async def test_equal_questions_in_flight_share_a_worker_until_the_last_is_cancelled() -> None:
    async with running(1, cache_size=100) as pool:
        asking = [asyncio.create_task(ask(pool, "wait")) for _ in range(3)]
        await asyncio.sleep(0.1)
        asking[0].cancel()
        answers = await asyncio.gather(*asking[1:])
        assert [one.reason for one in answers] == [Reason.CORRECT] * 2
        hangs = [asyncio.create_task(ask(pool, "hang")) for _ in range(2)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        for one in hangs:
            one.cancel()
        assert (await ask(pool, "right")).reason is Reason.CORRECT
        assert time.monotonic() - began < 0.5


async def test_workers_write_no_file_and_reach_no_network(tmp_path: Path) -> None:
    async with running() as pool:
        assert (await ask(pool, "write", str(tmp_path / "file"))).verdict is Verdict.ERROR
        assert (await ask(pool, "limits")).reason is Reason.CORRECT
        with listening() as port:
            found = await ask(pool, "connect", str(port))
        if pool.cut_off:
            assert found.verdict is Verdict.ERROR


async def test_the_users_own_code_keeps_network_and_files(tmp_path: Path) -> None:
    async with running(network=True) as pool:
        assert (await ask(pool, "write", str(tmp_path / "file"))).reason is Reason.CORRECT
        with listening() as port:
            assert (await ask(pool, "connect", str(port))).reason is Reason.CORRECT


@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("seconds", [20, pytest.param(3600, marks=pytest.mark.nightly)])
async def test_memory_stays_flat_with_one_bomb_in_a_hundred(seconds: float) -> None:
    """Questions that differ, of which every hundredth hangs."""
    found = await soak(seconds)
    assert found.growth < 0.01, found
    assert found.lost == 0, found


@contextmanager
def listening() -> Iterator[int]:
    """A port of this machine that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# ------------------------------------------------------------------------------------------------- graders of workers


def grader(name: str) -> Decide:
    """The loader of these tests' pools."""
    return globals()[f"decide_{name}"]


def right(value: float | None = None) -> Graded:
    return Graded(Verdict.SCORED, Reason.CORRECT, value=value)


def decide_right(question: Question) -> Graded:
    return right()


def decide_hang(question: Question) -> Graded:
    while True:
        pass


def decide_wait(question: Question) -> Graded:
    time.sleep(0.3)
    return right()


def decide_pid(question: Question) -> Graded:
    return right(os.getpid())


def decide_parent(question: Question) -> Graded:
    return right(os.getppid())


def decide_exit(question: Question) -> Graded:
    os._exit(3)


def decide_crash(question: Question) -> Graded:
    time.sleep(0.4)
    os.kill(os.getpid(), signal.SIGSEGV)
    return right()


def decide_raise(question: Question) -> Graded:
    raise RecursionError


def decide_memory(question: Question) -> Graded:
    return right(len(bytearray(4 << 30)))


def decide_garbage(question: Question) -> Graded:
    """Writes to every socket that this process has, of which one is the pool's."""
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, b"{]\n")
    return right()


def decide_fork(question: Question) -> Graded:
    os.fork()
    return right()


def decide_echo(question: Question) -> Graded:
    return right(float(question.answer))


def decide_nonsense(question: Question) -> Graded:
    return None  # pyright: ignore[reportReturnType]


def decide_write(question: Question) -> Graded:
    Path(question.answer).write_text("x")
    return right()


def decide_limits(question: Question) -> Graded:
    limits = [
        resource.getrlimit(one)[0] for one in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)
    ]
    return right() if limits == [0, 0, 0] else Graded(Verdict.SCORED, Reason.WRONG)


def decide_connect(question: Question) -> Graded:
    socket.create_connection(("127.0.0.1", int(question.answer)), timeout=0.5).close()
    return right()
