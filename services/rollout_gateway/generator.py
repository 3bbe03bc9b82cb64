"""Generates one group to its end, on one engine after another if need be."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from prometheus_client import Counter

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.errors import Aborted, DeadlineExceeded, FailedPrecondition, FlotillaError, Unavailable
from services.common.logs import get_logger
from services.common.rpc import from_rpc_error
from services.common.service import Backoff
from services.rollout_gateway.codec import FINISH_FROM, generate_request, spans_from
from services.rollout_gateway.group import Group, SampleProgress
from services.rollout_gateway.pool import Connection, EnginePool, Places
from services.rollout_gateway.race import race

STREAM_TIMEOUT_S = 3600.0
"""A stream that takes longer is cut and continued from its tokens."""
MAX_REFUSALS = 3
"""An engine's error that comes so often in a row is the group's fault."""

FINISHED = Counter("flotilla_gateway_finished_samples", "Samples finished since start")
TOKENS = Counter("flotilla_gateway_generated_tokens", "Response tokens since start")
INTERRUPTED = Counter("flotilla_gateway_interrupted_streams", "Streams that ended before their samples, since start")

log = get_logger(__name__)


class GenerationFailed(FailedPrecondition):
    """Engines refuse a group time and again."""


class Generator:
    """Runs groups on the engines of a pool."""

    def __init__(self, run_id: str, pool: EnginePool) -> None:
        self._run_id = run_id
        self._pool = pool
        self.finished_samples = 0
        self.generated_tokens = 0

    async def generate(self, group: Group, on_finished: Callable[[list[SampleProgress]], None]) -> None:
        """Generate until every sample is finished; cancelling aborts it at the engine.

        Args:
            group: It grows as tokens come.
            on_finished: Called with the samples that finished together.

        Raises:
            GenerationFailed: Engines answered with an error several times in a row.
        """
        refusals = 0
        backoff = Backoff()
        while group.unfinished():
            error = await self._one_stream(group, on_finished)
            if error is None:
                continue
            INTERRUPTED.inc()
            refusals = 0 if _is_passing(error) else refusals + 1
            log.warning("a stream broke", group=group.group_id, error=str(error), refusals=refusals)
            if refusals == MAX_REFUSALS:
                raise GenerationFailed(f"{type(error).__name__}: {error}")
            await backoff.wait()

    async def _one_stream(
        self, group: Group, on_finished: Callable[[list[SampleProgress]], None]
    ) -> FlotillaError | None:
        async with self._pool.places(len(group.unfinished()), group.required_version) as places:
            for sample in group.unfinished():
                sample.begin_segment(places.engine.version)
            try:
                await race(self._stream(group, places, on_finished), _raise_when_gone(places.connection))
            except FlotillaError as error:
                if isinstance(error, Unavailable):
                    self._pool.lose(places.engine, str(error))
                return error
            return None

    async def _stream(self, group: Group, places: Places, on_finished: Callable[[list[SampleProgress]], None]) -> bool:
        unfinished = {sample.index: sample for sample in group.unfinished()}
        request = generate_request(self._run_id, group)
        try:
            async for response in places.connection.stub.Generate(request, timeout=STREAM_TIMEOUT_S):
                if finished := self._apply(response, unfinished):
                    self._pool.give_back(places, len(finished))
                    on_finished(finished)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        if group.unfinished():
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
