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

from flotilla.buffer.v1 import buffer_pb2_grpc, registry_pb2_grpc
from services.buffer.capacity import check_capacity
from services.buffer.connection import check_durability
from services.buffer.data import load_prompts
from services.buffer.evaluation import Evaluations
from services.buffer.filters import load_buffer_filter, load_filter
from services.buffer.grading import Grader
from services.buffer.ledger import Ledger
from services.buffer.registry_servicer import RegistryServicer
from services.buffer.run import Run
from services.buffer.sealing import Sealer
from services.buffer.servicer import BufferServicer
from services.buffer.watch import StatsWatch
from services.buffer.work import expire_loop, repeat
from services.common.errors import Unavailable
from services.common.logs import get_logger
from services.common.rpc import open_channel
from services.common.service import Backoff, ServiceHost, run_service
from services.common.spec import RunSpec
from services.common.tokenizers import load_tokenizer, stop_token_ids

REDIS_PATIENCE_S = 300.0
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
        group_filter=load_filter(spec.rollout.dynamic_sampling_filter),
        buffer_filter=load_buffer_filter(spec.rollout.buffer_filter) if spec.rollout.buffer_filter else None,
    )


async def wait_for_redis(ledger: Ledger, host: ServiceHost) -> int:
    """Return when Redis answers and is durable, with its memory limit in bytes. Raises Unavailable after a while."""
    backoff, loop = Backoff(), asyncio.get_running_loop()
    give_up = loop.time() + REDIS_PATIENCE_S
    with host.board.waiting("Redis"):
        while True:
            try:
                return await check_durability(ledger.redis, host.spec.redis)
            except Unavailable:
                if loop.time() > give_up:
                    raise
            await backoff.wait()


async def setup(host: ServiceHost) -> None:
    """Load the data, wait for Redis, and start loops and servicers."""
    spec = host.spec
    ledger = Ledger(spec)
    host.on_stop.append(ledger.close)
    run = await asyncio.to_thread(load_run_data, spec, ledger)
    log.info("prompts", count=len(run.training.prompts), overlong=run.training.overlong)
    check_capacity(spec, await wait_for_redis(ledger, host))
    await ledger.register(spec.digest(), run.data_digest())
    reward_channel = open_channel(spec.services.reward.grpc)
    host.on_stop.append(reward_channel.close)
    evaluations, watch = Evaluations(run), StatsWatch(run)
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
    grader, sealer = Grader(run, host.board, reward_channel), Sealer(run)
    host.spawn(expire_loop(run), "expire")
    host.spawn(repeat(run.grade_pulse, host.board, "grade", grader.step), "grade")
    host.spawn(repeat(run.pulse, host.board, "seal", sealer.step), "seal")
    host.spawn(watch.loop(), "stats")
    host.spawn(evaluations.write_loop(), "evaluations")


if __name__ == "__main__":
    run_service("buffer", setup, lambda spec: spec.services.buffer)
