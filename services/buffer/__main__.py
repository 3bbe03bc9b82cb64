"""The buffer: `python -m services.buffer --run RUN.toml`.

    gateway ── LeaseWork, RenewLease, SubmitSamples ─►┌────────┐◄─ LeaseBatch, FetchSamples, AckBatch, Commit ── trainer
                                                      │ buffer │◄─ BeginEpoch, RecordVersion ── trainer, weight_sync
    reward ◄────────────── Grade ─────────────────────└───┬────┘
                                                          ▼ Lua
                                                        Redis

Waits: a gateway in LeaseWork for admission credit (freed by a drop, a failure, a new live version); a trainer in
LeaseBatch for a sealed batch (the last kept group of the step); the buffer for Redis and for the reward service.
"""

from __future__ import annotations

import asyncio

from prometheus_client import Gauge

from flotilla.buffer.v1 import buffer_pb2_grpc, registry_pb2_grpc
from services.buffer.data import load_prompts, load_tokenizer, stop_token_ids
from services.buffer.evaluation import Evaluations
from services.buffer.ledger import Ledger, Stats
from services.buffer.registry_servicer import RegistryServicer
from services.buffer.run import Run
from services.buffer.servicer import BufferServicer
from services.buffer.work import Worker
from services.common.errors import Unavailable
from services.common.logs import get_logger
from services.common.rpc import open_channel
from services.common.service import Backoff, ServiceHost, run_service
from services.common.spec import RunSpec

REDIS_PATIENCE_S = 300.0
STATS_EVERY_S = 1.0

GROUPS = Gauge("flotilla_buffer_groups", "Groups by state", ["ledger", "state"])
ISSUED = Gauge("flotilla_buffer_issued_groups", "Groups ever issued", ["ledger"])
UNACCOUNTED = Gauge("flotilla_buffer_unaccounted_groups", "Issued minus the sum over all states; 0 always", ["ledger"])

log = get_logger(__name__)


def load_run_data(spec: RunSpec, ledger: Ledger) -> Run:
    """Tokenizer and prompts. Raises SpecError for bad files."""
    tokenizer = load_tokenizer(spec.model.hf_checkpoint)
    return Run(
        spec=spec,
        ledger=ledger,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(spec.model.hf_checkpoint, tokenizer),
        training=load_prompts(spec.data.prompt_data, spec.data, tokenizer),
        evaluation={
            name: load_prompts(one.prompt_data, spec.data, tokenizer, one.max_prompts)
            for name, one in spec.evaluation.sets.items()
        },
    )


async def wait_for_redis(ledger: Ledger, host: ServiceHost) -> None:
    """Return when Redis answers and is durable. Raises Unavailable after a while."""
    backoff, loop = Backoff(), asyncio.get_running_loop()
    give_up = loop.time() + REDIS_PATIENCE_S
    with host.board.waiting("Redis"):
        while True:
            try:
                return await ledger.check_durability()
            except Unavailable:
                if loop.time() > give_up:
                    raise
            await backoff.wait()


class StatsWatch:
    """Keeps the last counts for metrics, /statusz and /readyz."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._stats: Stats | None = None
        self._problem = "no counts yet"

    async def loop(self) -> None:
        """Read the counts every second."""
        while True:
            try:
                self._show(await self._ledger.stats())
                self._problem = ""
            except Unavailable as error:
                self._problem = str(error)
            await asyncio.sleep(STATS_EVERY_S)

    def problem(self) -> str:
        """Readiness."""
        return self._problem

    def details(self) -> dict[str, object]:
        """For /statusz."""
        if self._stats is None:
            return {}
        groups = {state.value: count for state, count in self._stats.train.items() if count}
        return {"groups": groups, "dropped": self._stats.dropped, "failed": self._stats.failed, "run": self._stats.run}

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


async def setup(host: ServiceHost) -> None:
    """Load the data, wait for Redis, and start loops and servicers."""
    spec = host.spec
    ledger = Ledger(spec)
    host.on_stop.append(ledger.close)
    run = await asyncio.to_thread(load_run_data, spec, ledger)
    log.info("prompts", count=len(run.training.prompts), overlong=run.training.overlong)
    await wait_for_redis(ledger, host)
    await ledger.register(spec.digest(), run.data_digest())
    reward_channel = open_channel(spec.services.reward.grpc)
    host.on_stop.append(reward_channel.close)
    evaluations, watch = Evaluations(run), StatsWatch(ledger)
    host.board.checks["redis"] = watch.problem
    host.board.details = watch.details
    host.serve(
        "flotilla.buffer.v1.BufferService",
        buffer_pb2_grpc.add_BufferServiceServicer_to_server,
        BufferServicer(run, evaluations),
    )
    host.serve(
        "flotilla.buffer.v1.RunRegistryService",
        registry_pb2_grpc.add_RunRegistryServiceServicer_to_server,
        RegistryServicer(run, evaluations),
    )
    for name, loop in Worker(run, host.board, reward_channel).loops().items():
        host.spawn(loop(), name)
    host.spawn(watch.loop(), "stats")
    host.spawn(evaluations.write_loop(), "evaluations")


if __name__ == "__main__":
    run_service("buffer", setup, lambda spec: spec.services.buffer)
