"""One group of responses at the engine: started together, streamed as one, aborted by name."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge

from services.common.errors import FlotillaError
from services.rollout_gateway.engine.vllm_engine import Delta, Finish, Sampling, VllmEngine
from services.rollout_gateway.spans import joined

FLUSH_INTERVAL_S = 0.25
"""Tokens wait at most this long to travel with others; each message costs a millisecond of both cores."""
SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, so that segments of one sample never share a seed (the golden ratio in 64 bits)."""

RUNNING = Gauge("flotilla_engine_running_samples", "Samples that vLLM holds")
TOKENS = Counter("flotilla_engine_generated_tokens", "Response tokens since start")


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One response to generate, or to continue."""

    index: int
    done: tuple[int, ...]
    """Response tokens of earlier segments."""
    seed: int


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Responses to one prompt."""

    group_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    """Its max_tokens counts the tokens of earlier segments; its seed is not used."""
    samples: tuple[SampleSpec, ...]


def segment_sampling(group: GroupSpec, sample: SampleSpec, max_model_len: int) -> Sampling:
    """What the engine is asked for in this segment; max_tokens of 0 or less says that nothing is left."""
    done = len(sample.done)
    left = min(group.sampling.max_tokens, max_model_len - len(group.prompt)) - done
    asked = group.sampling
    return Sampling(
        asked.temperature, asked.top_p, asked.top_k, left, asked.stop_token_ids, sample.seed + done * SEED_STEP
    )


@dataclass(slots=True)
class DeltaBuffer:
    """Collects the deltas of a group until somebody takes them."""

    unfinished: int
    deltas: dict[int, Delta] = field(default_factory=dict)
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: FlotillaError | None = None

    def add(self, index: int, delta: Delta) -> None:
        """Append to what waits for this sample."""
        waiting = self.deltas.get(index)
        self.deltas[index] = delta if waiting is None else _concatenated(waiting, delta)
        self.filled.set()
        if delta.finish is not None:
            self.unfinished -= 1
        if not self.unfinished:
            self.ended.set()

    def fail(self, error: FlotillaError) -> None:
        """End the group with an error."""
        self.error = error
        self.filled.set()
        self.ended.set()

    async def take(self) -> dict[int, Delta]:
        """Wait for something, then a moment longer for more. Raises the error that ended the group."""
        await self.filled.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_INTERVAL_S):
                await self.ended.wait()
        if self.error:
            raise self.error
        self.filled.clear()
        taken, self.deltas = self.deltas, {}
        return taken


def _concatenated(first: Delta, second: Delta) -> Delta:
    return Delta(
        [*first.token_ids, *second.token_ids],
        [*first.log_probs, *second.log_probs],
        joined([*first.spans, *second.spans]),
        second.finish,
    )


class Generations:
    """Every group that runs in this engine."""

    def __init__(self, engine: VllmEngine, max_model_len: int) -> None:
        self._engine = engine
        self._max_model_len = max_model_len
        self._running: dict[str, set[str]] = {}
        """Request ids at the engine, by group."""
        self.generated_tokens = 0

    @property
    def running_samples(self) -> int:
        """Samples that are not finished."""
        return sum(len(requests) for requests in self._running.values())

    async def run(self, group: GroupSpec) -> AsyncIterator[dict[int, Delta]]:
        """Deltas by sample index until every sample is finished; leaving early aborts the rest.

        Raises:
            InvalidArgument: vLLM refuses a request.
            Unavailable: The engine died.
        """
        buffer = DeltaBuffer(len(group.samples))
        tasks = [asyncio.create_task(self._run_sample(group, sample, buffer)) for sample in group.samples]
        try:
            while buffer.unfinished or buffer.deltas:
                yield await buffer.take()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_sample(self, group: GroupSpec, sample: SampleSpec, buffer: DeltaBuffer) -> None:
        sampling = segment_sampling(group, sample, self._max_model_len)
        if sampling.max_tokens <= 0:
            buffer.add(sample.index, Delta((), (), [], Finish.LENGTH))
            return
        request_id = f"{group.group_id}/{sample.index}/{uuid.uuid4().hex}"
        self._running.setdefault(group.group_id, set()).add(request_id)
        RUNNING.inc()
        try:
            async for delta in self._engine.generate(request_id, group.prompt + sample.done, sampling):
                self.generated_tokens += len(delta.token_ids)
                TOKENS.inc(len(delta.token_ids))
                buffer.add(sample.index, delta)
        except FlotillaError as error:
            buffer.fail(error)
        finally:
            RUNNING.dec()
            self._running[group.group_id].discard(request_id)
            if not self._running[group.group_id]:
                del self._running[group.group_id]

    async def abort(self, group_ids: Collection[str]) -> int:
        """Abort groups, all if none is named; returns how many samples were running."""
        groups = group_ids or list(self._running)
        requests = [request for group in groups for request in self._running.get(group, ())]
        await self._engine.abort(requests)
        return len(requests)
