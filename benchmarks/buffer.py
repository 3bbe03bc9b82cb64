"""Speed and memory of the buffer on real Redis with `appendfsync always`, all on this machine.

    python -m benchmarks.buffer [--only loops|long|memory|ledger] [--seconds 10]

The buffer is the real process over a real Redis of its own. Clients (a process of their own) lease groups and submit
samples that lie ready; this process trains nothing, it leases, acknowledges and commits what is sealed. The loops run
without grading (benchmarks/buffer_ungraded.py); where there is some, this process stands in for the reward service and
scores at once. CPU time is said beside rates: it depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from redis import Redis

from benchmarks.buffer_clients import (
    Record,
    closed_loop,
    fetch,
    lease_loop,
    make_samples,
    open_loop,
    spread,
    submit_all,
)
from benchmarks.buffer_raw import RawRun, make_finished, set_bytes_per_s
from benchmarks.buffer_stack import (
    BATCH,
    GROUP,
    RUN_ID,
    STALENESS,
    UNGRADED,
    Stack,
    make_spec,
    running,
    serving,
    start_redis,
)
from benchmarks.records import Row, table
from flotilla.buffer.v1 import buffer_pb2 as pb
from services.common.rpc import call

CLIENTS = 64
FEW, SHORT, LONG = 4, 1024, 32_768
"""Response tokens."""
LONG_CLIENTS = 8
WARM_S = 2.0
LEDGER_GROUPS = 100_000
LEASES, STATS_CALLS = 200, 200
SETTLED_S = 120.0

Apart = Callable[..., Awaitable[Any]]
"""Runs a function of buffer_clients in the process of the clients."""


def row(what: str, bar: str, measured: str) -> Row:
    """One line of the table."""
    return {"what": what, "bar": bar, "measured": measured}


def percentile(values: Sequence[float], percent: int) -> float:
    """In milliseconds, of seconds."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000


async def loops(folder: Path, seconds: float, apart: Apart) -> list[Row]:
    """Closed loop, open loop at half its rate, and the scripts alone; then the closed loop with grading."""
    async with running(folder / "ungraded", SHORT, UNGRADED) as stack, asyncio.TaskGroup() as tasks:
        training = tasks.create_task(stack.train())
        rate, spent = await closed_rate(stack, seconds, apart)
        due = rate / GROUP / 2
        opened: Record = await apart(open_loop, stack.target, stack.epoch, CLIENTS, SHORT, seconds, due)
        training.cancel()
    connected, pipelined = await asyncio.to_thread(raw_rates, folder, seconds)
    async with running(folder / "graded", SHORT) as stack, asyncio.TaskGroup() as tasks:
        training = tasks.create_task(stack.train())
        graded, spent_graded = await closed_rate(stack, seconds, apart)
        training.cancel()
    leases, submits = (
        f"p50 {percentile(one, 50):.1f}, p99 {percentile(one, 99):.1f} ms" for one in (opened.lease_s, opened.submit_s)
    )
    return [
        row("lease, submit, seal, ack: 1k-token samples/s, 64 clients, no grading", "2,000", f"{rate:,.0f}"),
        row("CPU time, us a sample", "-", spent),
        row(f"open loop, {due * GROUP:,.0f} samples/s: LeaseWork", "p99 20 ms", leases),
        row("the same: SubmitSamples", "p99 30 ms", submits),
        row("leases that found no work", "-", f"{opened.without_work} of {len(opened.lease_s) + opened.without_work}"),
        row("share of redis-py alone, 64 connections", "50 %", f"{rate / connected:.0%} of {connected:,.0f}"),
        row("share of redis-py alone, pipelines of 64", "50 %", f"{rate / pipelined:.0%} of {pipelined:,.0f}"),
        row("the same with text for a reward service that scores at once: samples/s", "-", f"{graded:,.0f}"),
        row("CPU time, us a sample", "-", spent_graded),
    ]


async def closed_rate(stack: Stack, seconds: float, apart: Apart) -> tuple[float, str]:
    """Samples per second of a closed loop while the stack trains, and the CPU time of a sample by process."""
    closed: Record = await apart(closed_loop, stack.target, stack.epoch, stack.pids, CLIENTS, SHORT, WARM_S + seconds)
    samples = sum(count for _, count in stack.trained)
    spent = ", ".join(f"{name} {one / samples * 1e6:.0f}" for name, one in closed.cpu_s.items())
    return stack.samples_per_s(WARM_S), spent


def raw_rates(folder: Path, seconds: float) -> tuple[float, float]:
    """Samples per second of the scripts alone: over 64 connections, and pipelined."""
    redis = start_redis(folder / "raw")
    try:
        run = RawRun(make_spec(folder / "raw", redis.port, SHORT))
        samples = make_finished(make_samples([SHORT] * GROUP, epoch=1))
        return run.connected(samples, seconds), run.pipelined(samples, seconds)
    finally:
        redis.stop()


async def long_samples(folder: Path, seconds: float, apart: Apart) -> list[Row]:
    """In and out with 32k-token samples; all but one sample of each group, so that nothing is graded meanwhile."""
    async with running(folder, 2 * LONG) as stack:
        payloads = [one.SerializeToString() for one in make_samples(spread(LONG, 0.5), stack.epoch)]
        ceiling = await asyncio.to_thread(set_bytes_per_s, stack.redis.port, payloads, seconds)
        Redis(port=stack.redis.port).delete(*Redis(port=stack.redis.port).keys("raw:*"))
        sent: Record = await apart(
            submit_all, stack.target, stack.epoch, stack.pids, LONG_CLIENTS, LONG, BATCH * STALENESS
        )
        await stack.sealed(STALENESS)
        got: Record = await apart(fetch, stack.target, stack.pids, 0, BATCH * GROUP, LONG_CLIENTS, seconds)
    rate_in, rate_out = (one.payload_bytes / one.wall_s / 1e6 for one in (sent, got))
    return [
        row("32k-token samples in, MB/s", "-", f"{rate_in:.0f}"),
        row("CPU time, ms a MB", "-", ms_per_mb(sent)),
        row("plain SET of them in the same Redis, MB/s", "-", f"{ceiling / 1e6:.0f}"),
        row("share of it", "50 %", f"{rate_in / ceiling * 1e6:.0%}"),
        row("32k-token samples out, MB/s", "150", f"{rate_out:.0f}"),
        row("CPU time, ms a MB", "-", ms_per_mb(got)),
    ]


def ms_per_mb(record: Record) -> str:
    """CPU time by process."""
    return ", ".join(f"{name} {one / record.payload_bytes * 1e9:.1f}" for name, one in record.cpu_s.items())


async def memory(folder: Path, seconds: float, apart: Apart) -> list[Row]:
    """What Redis needs for samples beyond their bytes, from the lease to the seal."""
    found = []
    for tokens in (SHORT, LONG):
        async with running(folder / str(tokens), 2 * tokens) as stack:
            redis, groups = Redis(port=stack.redis.port), BATCH * STALENESS
            before = redis.info("memory")
            sent: Record = await apart(submit_all, stack.target, stack.epoch, stack.pids, LONG_CLIENTS, tokens, groups)
            await stack.sealed(STALENESS)
            after = redis.info("memory")
        data, used = (
            (after[name] - before[name]) / sent.total_bytes - 1 for name in ("used_memory_dataset", "used_memory")
        )
        found.append(
            row(f"memory over the payload, {tokens}-token samples", "15 %", f"{data:.1%} (all of Redis: {used:.1%})")
        )
    return found


async def ledger(folder: Path, seconds: float, apart: Apart) -> list[Row]:
    """A ledger of many groups beside an empty one, asked by turns."""
    async with filled(folder / "empty", 0) as empty, filled(folder / "full", LEDGER_GROUPS) as full:
        leased: list[Record] = await apart(lease_loop, [empty.target, full.target], LEASES)
        stats_s = [await timed_stats(full) for _ in range(STATS_CALLS)]
    of_empty, of_full = (percentile(one.lease_s, 50) for one in leased)
    last = f"median {percentile(stats_s, 50):.1f}, p99 {percentile(stats_s, 99):.1f} ms"
    return [
        row(f"GetBufferStats, {LEDGER_GROUPS:,} groups in the ledger", "50 ms", last),
        row(
            "LeaseWork, median against an empty ledger",
            "+20 %",
            f"{of_full:.2f} against {of_empty:.2f} ms: {of_full / of_empty - 1:+.0%}",
        ),
    ]


@contextlib.asynccontextmanager
async def filled(folder: Path, groups: int) -> AsyncIterator[Stack]:
    """A stack whose ledger holds so many committed groups."""
    redis = start_redis(folder)
    try:
        spec = make_spec(folder, redis.port, SHORT)
        run = RawRun(spec)
        await asyncio.to_thread(run.fill, make_finished(make_samples([FEW] * GROUP, epoch=1)), groups)
        async with serving(folder, spec, redis) as stack:
            yield stack
    finally:
        redis.stop()


async def timed_stats(stack: Stack) -> float:
    """Seconds of one call."""
    begun = time.monotonic()
    stats = await call(stack.stub.GetBufferStats, pb.GetBufferStatsRequest(run_id=RUN_ID), timeout_s=SETTLED_S)
    assert stats.conserved
    return time.monotonic() - begun


MEASUREMENTS = {"loops": loops, "long": long_samples, "memory": memory, "ledger": ledger}


async def measure(name: str, seconds: float) -> list[Row]:
    """The rows of one measurement, in a folder of its own."""
    loop = asyncio.get_running_loop()
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        return await MEASUREMENTS[name](Path(folder), seconds, lambda *work: loop.run_in_executor(pool, *work))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MEASUREMENTS, help="one measurement of them")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rate that is measured")
    args = parser.parse_args()
    rows, before = [], os.getloadavg()[0]
    for name in [args.only] if args.only else MEASUREMENTS:
        rows += asyncio.run(measure(name, args.seconds))
    print(table(rows))
    print(f"\n{os.cpu_count()} CPUs; load average before {before:.1f}, after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
