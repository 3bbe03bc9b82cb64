"""Generates one group to its end, on one engine after another if need be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from prometheus_client import Counter

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.errors import Aborted, DeadlineExceeded, FailedPrecondition, FlotillaError, Unavailable
from services.common.logs import get_logger
from services.common.rpc import call, from_rpc_error, new_request_id
from services.common.service import Backoff
from services.rollout_gateway.codec import FINISH_FROM, generate_request, spans_from
from services.rollout_gateway.group import Group, SampleProgress
from services.rollout_gateway.pool import Connection, EnginePool, Places
from services.rollout_gateway.race import race

STREAM_TIMEOUT_S = 3600.0
"""A stream that takes longer is cut and continued from its tokens."""
DRAIN_S = 2.0
"""Time for an engine to abort a group and to send what it has of it; milliseconds unless it is in trouble."""
MAX_REFUSALS = 3
"""An engine's error that comes so often in a row is the group's fault."""

FINISHED = Counter("flotilla_gateway_finished_samples", "Samples finished since start")
TOKENS = Counter("flotilla_gateway_generated_tokens", "Response tokens since start")
INTERRUPTED = Counter("flotilla_gateway_interrupted_streams", "Streams that ended before their samples, since start")

log = get_logger(__name__)


class GenerationFailed(FailedPrecondition):
    """Engines refuse a group time and again."""


@dataclass(slots=True)
class Job:
    """A group that is generated."""

    group: Group
    on_finished: Callable[[list[SampleProgress]], None]
    stop: asyncio.Event
    connection: Connection | None = None
    """To the engine that it runs on, or ran on last."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no engine runs it."""

    def __post_init__(self) -> None:
        self.idle.set()


class Generator:
    """Runs groups on the engines of a pool."""

    def __init__(self, run_id: str, pool: EnginePool) -> None:
        self._run_id = run_id
        self._pool = pool
        self.finished_samples = 0
        self.generated_tokens = 0

    async def generate(
        self, group: Group, on_finished: Callable[[list[SampleProgress]], None], stop: asyncio.Event
    ) -> None:
        """Generate until every sample is finished; cancelling aborts it at the engine, and drops what is on its way.

        Args:
            group: It grows as tokens come.
            on_finished: Called with the samples that finished together.
            stop: Set to end early: within DRAIN_S, with all tokens that the engine has generated.

        Raises:
            GenerationFailed: Engines answered with an error several times in a row.
        """
        job = Job(group, on_finished, stop)
        await race(self._until_finished(job), self._until_stopped(job))

    async def _until_stopped(self, job: Job) -> bool:
        await job.stop.wait()
        if job.connection and not job.idle.is_set():
            request = engine_pb2.AbortRequest(
                run_id=self._run_id, request_id=new_request_id(), group_ids=[job.group.group_id]
            )
            with contextlib.suppress(FlotillaError, TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await call(job.connection.stub.Abort, request, timeout_s=DRAIN_S)
                    await job.idle.wait()
        return True

    async def _until_finished(self, job: Job) -> bool:
        refusals = 0
        backoff = Backoff()
        while job.group.unfinished() and not job.stop.is_set():
            error = await self._one_stream(job)
            if error is None or job.stop.is_set():
                continue
            INTERRUPTED.inc()
            refusals = 0 if _is_passing(error) else refusals + 1
            log.warning("a stream broke", group=job.group.group_id, error=str(error), refusals=refusals)
            if refusals == MAX_REFUSALS:
                raise GenerationFailed(f"{type(error).__name__}: {error}")
            await backoff.wait()
        return True

    async def _one_stream(self, job: Job) -> FlotillaError | None:
        group = job.group
        async with self._pool.places(len(group.unfinished()), group.required_version) as places:
            for sample in group.unfinished():
                sample.begin_segment(places.engine.version, continue_across_versions=group.continue_across_versions)
            try:
                await race(self._stream(job, places), _raise_when_gone(places.connection))
            except FlotillaError as error:
                if isinstance(error, Unavailable):
                    self._pool.lose(places.engine, str(error))
                return error
            return None

    async def _stream(self, job: Job, places: Places) -> bool:
        unfinished = {sample.index: sample for sample in job.group.unfinished()}
        request = generate_request(self._run_id, job.group, places.engine.version)
        job.connection = places.connection
        job.idle.clear()
        try:
            async for response in places.connection.stub.Generate(request, timeout=STREAM_TIMEOUT_S):
                if finished := self._apply(response, unfinished):
                    self._pool.give_back(places, len(finished))
                    job.on_finished(finished)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            job.idle.set()
        if job.group.unfinished():
            raise Aborted("the engine aborted samples")
        return True

    def _apply(
        self, response: engine_pb2.EngineServiceGenerateResponse, samples: dict[int, SampleProgress]
    ) -> list[SampleProgress]:
        finished = []
        for delta in response.deltas:
            sample = samples[delta.sample_index]
            finish = FINISH_FROM.get(delta.finish_reason)
            sample.extend(delta.token_ids, delta.log_probs, spans_from(delta.policy_spans), finish)
            self.generated_tokens += len(delta.token_ids)
            TOKENS.inc(len(delta.token_ids))
            if finish:
                finished.append(sample)
        self.finished_samples += len(finished)
        FINISHED.inc(len(finished))
        return finished


async def _raise_when_gone(connection: Connection) -> None:
    await connection.gone.wait()
    raise Unavailable("the engine is gone")


def _is_passing(error: FlotillaError) -> bool:
    """True if the group may well run elsewhere, or later: the engine went away, stopped, or changed its version."""
    return isinstance(error, Unavailable | DeadlineExceeded | Aborted | FailedPrecondition)
