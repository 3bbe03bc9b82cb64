"""The counts of a run once a second: for metrics, /statusz, /readyz, and the memory that admission looks at."""

from __future__ import annotations

import asyncio

from prometheus_client import Gauge

from services.buffer.records import Stats
from services.buffer.run import Run
from services.common.errors import Unavailable

STATS_EVERY_S = 1.0
PATIENCE_S = 5.0
"""Readiness ends when the counts cannot be read within it."""

GROUPS = Gauge("flotilla_buffer_groups", "Groups by state", ["ledger", "state"])
ISSUED = Gauge("flotilla_buffer_issued_groups", "Groups ever issued", ["ledger"])
UNACCOUNTED = Gauge("flotilla_buffer_unaccounted_groups", "Issued minus the sum over all states; 0 always", ["ledger"])
LEASES = Gauge("flotilla_buffer_leases", "Work leases that are held")
DROPPED = Gauge("flotilla_buffer_dropped_groups", "Groups that the filter dropped", ["reason"])
FAILED = Gauge("flotilla_buffer_failed_groups", "Groups that could not be generated or graded", ["reason"])
STALE = Gauge("flotilla_buffer_stale_groups", "Groups that became too old to be used", ["reason"])
DISCARDED = Gauge("flotilla_buffer_discarded_tokens", "Response tokens that were thrown away", ["reason"])
MEMORY_LIMIT = Gauge("flotilla_buffer_redis_memory_limit_bytes", "That limit; 0 if there is none")
MEMORY = Gauge("flotilla_buffer_redis_memory_bytes", "Memory of Redis that counts towards its limit")


class StatsWatch:
    """Keeps the last counts for metrics, /statusz and /readyz."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stats: Stats | None = None
        self._problem = "no counts yet"

    async def loop(self) -> None:
        """Read the counts every second."""
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    self._show(await self._run.ledger.stats())
                    await self._run.look_at_memory()
                MEMORY.set(self._run.memory.used)
                MEMORY_LIMIT.set(self._run.memory.limit)
                self._problem = ""
            except (Unavailable, TimeoutError) as error:
                self._problem = str(error) or f"Redis has not answered for {PATIENCE_S:.0f} s"
            await asyncio.sleep(STATS_EVERY_S)

    def problem(self) -> str:
        """Readiness."""
        return self._problem

    def details(self) -> dict[str, object]:
        """For /statusz."""
        if self._stats is None:
            return {}
        groups = {state.value: count for state, count in self._stats.train.items() if count}
        return {
            "groups": groups,
            "dropped": self._stats.dropped,
            "failed": self._stats.failed,
            "stale": self._stats.stale,
            "run": self._stats.run,
        }

    def _show(self, stats: Stats) -> None:
        self._stats = stats
        for ledger, counts, issued in (
            ("train", stats.train, stats.number("issued")),
            ("eval", stats.evaluation, stats.number("eval_issued")),
        ):
            ISSUED.labels(ledger).set(issued)
            UNACCOUNTED.labels(ledger).set(issued - sum(counts.values()))
            for state, count in counts.items():
                GROUPS.labels(ledger, state.value).set(count)
        LEASES.set(stats.leases)
        for reason, count in stats.dropped.items():
            DROPPED.labels(reason).set(count)
        for reason, count in stats.failed.items():
            FAILED.labels(reason).set(count)
        for reason, count in stats.stale.items():
            STALE.labels(reason).set(count)
        for reason, count in stats.discarded.items():
            DISCARDED.labels(reason).set(count)
