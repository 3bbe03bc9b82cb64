"""Speed and safety of the reward service, on this machine.

    python -m benchmarks.reward --data math-500.jsonl --cases grader_cases.jsonl [--grader G] [--only MEASUREMENT]

The rates grade the reference solutions of MATH-500, each with its own label and with another row's; `expected` of the
bombs and hostile cases does not count here, only that they end. The service of `grpc` is the real process; the bombs
and the soak use its worker pool in this process. CPU time is said beside rates: it depends less on what else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from psutil import Process

from benchmarks.records import Row, table
from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc as pb_grpc
from services.common.rpc import call, open_channel
from services.reward.graders import GRADERS, Grader
from services.reward.grading import grade_each
from services.reward.pool import WorkerPool
from services.reward.verdicts import Item, Question, Verdict
from tests.reward_service import START_S, running, slow_sums

WORKERS, TIMEOUT_S = 2, 1.0
BATCH, CALLS_AT_ONCE, PASSES = 64, 4, 5
NEIGHBOURS = 4
SOAK_CACHE = 1000
BOMB_EVERY = 100


def row(what: str, bar: str, measured: str) -> Row:
    """One line of the table."""
    return {"what": what, "bar": bar, "measured": measured}


def reference_items(data: Path) -> list[Item]:
    """Reference solutions, each with its own label and with another row's."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    responses = [f"<think>so</think> {one['metadata']['solution']}" for one in rows]
    labels = [one["label"] for one in rows]
    pairs = [*zip(responses, labels, strict=True), *zip(responses, [*labels[1:], labels[0]], strict=True)]
    return [Item(response, label) for response, label in pairs]


# ------------------------------------------------------------------------------------------------------------- rates


def in_process(name: str, items: list[Item]) -> list[Row]:
    """Grades per second of CPU time of one process that does everything itself."""
    rate = len(items) / cpu_s(GRADERS[name], items)
    return [row(f"{name}: grades per core-second in process", "10,000", f"{rate:,.0f}")]


def cpu_s(grader: Grader, items: list[Item]) -> float:
    """CPU seconds for all items; the best of three, the first of which loads what sympy needs."""
    found = []
    for _ in range(3):
        began = time.process_time()
        for item in items:
            draft = grader.grade_cheaply(item)
            if isinstance(draft, Question):
                grader.decide(draft)
        found.append(time.process_time() - began)
    return min(found)


async def through_grpc(name: str, items: list[Item]) -> list[Row]:
    """Grades per second of the service: first with an empty cache, then as in a run whose answers repeat."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), workers=WORKERS) as (service, address):
        process = Process(service.pid)
        async with open_channel(address) as channel:
            stub = pb_grpc.RewardServiceStub(channel)
            await call(stub.ListGraders, pb.ListGradersRequest(), timeout_s=5, patience_s=START_S)
            first = len(items) / await graded_s(stub, name, items)
            spent_s, before = 0.0, sum(process.cpu_times()[:2])
            for _ in range(PASSES):
                spent_s += await graded_s(stub, name, items)
            us = (sum(process.cpu_times()[:2]) - before) / PASSES / len(items) * 1e6
    again = PASSES * len(items) / spent_s
    return [
        row(f"{name}: grades/s through gRPC, batches of {BATCH}, first time", "3,000", f"{first:,.0f}"),
        row(f"{name}: the same again, answers known", "3,000", f"{again:,.0f} ({us:.0f} us of CPU each)"),
    ]


async def graded_s(stub: pb_grpc.RewardServiceAsyncStub, name: str, items: list[Item]) -> float:
    """Seconds until all are graded, a few batches at a time."""
    places, began = asyncio.Semaphore(CALLS_AT_ONCE), time.monotonic()

    async def grade(batch: list[Item]) -> None:
        async with places:
            content = [pb.GradeItem(response=one.response, label=one.label) for one in batch]
            await call(stub.Grade, pb.GradeRequest(run_id="bench", grader=name, items=content), timeout_s=60)

    await asyncio.gather(*(grade(items[at : at + BATCH]) for at in range(0, len(items), BATCH)))
    return time.monotonic() - began


# ------------------------------------------------------------------------------------------------------------- bombs


@dataclass(frozen=True, slots=True)
class Blast:
    """What one bad case did; all in seconds."""

    verdict_s: float
    refill_s: float
    slower_s: float
    """How much longer the slowest neighbour took than the slowest of the same kind without the case."""
    timed_out: bool


def bad_items(cases: Path) -> list[Item]:
    """Every case that hangs graders or attacks them."""
    rows = map(json.loads, cases.read_text().splitlines())
    return [Item(one["response"], one["label"]) for one in rows if one["kind"] in ("hang", "hostile")]


async def bombs(name: str, items: list[Item]) -> list[Row]:
    """The bad cases, each among neighbours that a worker must decide."""
    pool = WorkerPool(WORKERS, TIMEOUT_S, 10_000)
    await pool.start()
    try:
        blasts = [await blast(GRADERS[name], item, pool, index) for index, item in enumerate(items)]
    finally:
        await pool.stop()
    verdict, refill, slower = (
        max(getattr(one, what) for one in blasts) * 1000 for what in ("verdict_s", "refill_s", "slower_s")
    )
    late = sum(one.timed_out for one in blasts)
    return [
        row(f"{name}: slowest verdict of {len(items)} bad cases, {late} timeouts", "1,100 ms", f"{verdict:,.0f} ms"),
        row(f"{name}: longest until all workers run again", "1,000 ms", f"{refill:.0f} ms"),
        row(f"{name}: slowest neighbour, more than without", "50 ms", f"{slower:.0f} ms"),
    ]


async def blast(grader: Grader, bad: Item, pool: WorkerPool, index: int) -> Blast:
    """Grade a bad item and its neighbours at once, after neighbours of the same kind alone."""
    quiet_s = max(await asyncio.gather(*neighbours(pool, 2 * index)))
    began = time.monotonic()
    blasting = asyncio.create_task(grade_each([(grader, bad)], lambda _: pool))
    loud_s = max(await asyncio.gather(*neighbours(pool, 2 * index + 1)))
    graded = (await blasting)[0]
    verdict_s = time.monotonic() - began
    async with asyncio.timeout(60):
        while pool.alive < WORKERS:  # noqa: ASYNC110  nobody but this benchmark waits for it
            await asyncio.sleep(0.001)
    refill_s = time.monotonic() - began - verdict_s
    return Blast(verdict_s, refill_s, loud_s - quiet_s, graded.verdict is Verdict.TIMEOUT)


def neighbours(pool: WorkerPool, number: int) -> list[asyncio.Task[float]]:
    """Questions that sympy must answer, all new: the seconds that each takes."""
    return [asyncio.create_task(asked_s(pool, question(number * NEIGHBOURS + one))) for one in range(NEIGHBOURS)]


def question(number: int) -> Question:
    """An easy one for sympy, and different for each number."""
    return Question(f"\\boxed{{x(x+{number})}}", f"x^2+{number}x")


def bomb(number: int) -> Question:
    """One that sympy does not answer in time."""
    answer, label = slow_sums(number)
    return Question(f"\\boxed{{{answer}}}", label)


async def asked_s(pool: WorkerPool, asked: Question) -> float:
    """Seconds of one question."""
    began = time.monotonic()
    await pool.ask("deepscaler", asked)
    return time.monotonic() - began


# -------------------------------------------------------------------------------------------------------------- soak


@dataclass(frozen=True, slots=True)
class Soak:
    """What a long load did to a pool."""

    questions: int
    bombs: int
    growth: float
    """Of the memory of this process and the template, last fifth against second fifth."""
    lost: int
    """Workers that are missing at the end."""


async def soak(seconds: float) -> Soak:
    """Mixed load: questions that differ, of which every hundredth is a bomb."""
    pool = WorkerPool(WORKERS, TIMEOUT_S, 10_000, cache_size=SOAK_CACHE)
    await pool.start()
    sizes: list[tuple[float, float]] = []
    asked, began = 0, time.monotonic()

    async def ask_on() -> None:
        nonlocal asked
        while time.monotonic() - began < seconds:
            asked += 1
            await pool.ask("deepscaler", question(asked) if asked % BOMB_EVERY else bomb(asked))

    async def measure() -> None:
        while (now := time.monotonic() - began) < seconds:
            sizes.append((now, await asyncio.to_thread(memory_bytes)))
            await asyncio.sleep(min(1.0, seconds / 100))

    try:
        await asyncio.gather(*(ask_on() for _ in range(2 * WORKERS)), measure())
        await asyncio.sleep(1.0)  # what was killed last is replaced
        lost = WORKERS - pool.alive
    finally:
        await pool.stop()
    early, late = (
        statistics.median(size for at, size in sizes if first <= at / seconds < last)
        for first, last in ((0.2, 0.4), (0.8, 1.0))
    )
    return Soak(asked, asked // BOMB_EVERY, late / early - 1, lost)


def memory_bytes() -> float:
    """Anonymous resident memory of the processes that live as long as the pool: this one and the template.

    Workers are left out: each grows with what it answers and is replaced, so that a sum swings by more than the bar.
    What is private in the template is no measure, since that is what its workers happen not to share at the moment.
    """
    processes = (os.getpid(), *(child.pid for child in Process().children()))
    status = [Path(f"/proc/{process}/status").read_text() for process in processes]
    return sum(float(text.partition("RssAnon:")[2].split()[0]) * 1024 for text in status)


async def soaked(seconds: float) -> list[Row]:
    """The rows of a soak."""
    found = await soak(seconds)
    what = f"{found.questions:,} questions with {found.bombs} bombs in {seconds:.0f} s"
    return [
        row(f"{what}: growth of memory", "1 %", f"{found.growth:+.1%}"),
        row("the same: workers lost", "0", str(found.lost)),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="MATH-500 with solutions in metadata")
    parser.add_argument("--cases", type=Path, required=True, help="labelled cases with their kind")
    parser.add_argument("--grader", choices=sorted(GRADERS), default="deepscaler")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the soak")
    parser.add_argument("--only", choices=("process", "grpc", "bombs", "soak"), help="one measurement of them")
    args = parser.parse_args()
    items = reference_items(args.data)
    measurements: dict[str, Callable[[], list[Row]]] = {
        "process": lambda: in_process(args.grader, items),
        "grpc": lambda: asyncio.run(through_grpc(args.grader, items)),
        "bombs": lambda: asyncio.run(bombs(args.grader, bad_items(args.cases))),
        "soak": lambda: asyncio.run(soaked(args.seconds)),
    }
    rows, before = [], os.getloadavg()[0]
    for name in [args.only] if args.only else measurements:
        rows += measurements[name]()
    print(table(rows))
    print(f"\n{os.cpu_count()} CPUs; load average before {before:.1f}, after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
