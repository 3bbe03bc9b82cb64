"""vLLM's AsyncLLM: token ids in, token deltas with log-probs and policy spans out.

Works with vLLM 0.24 and 0.32. Only this module, `arguments` and `versions` know vLLM.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from services.common.errors import InvalidArgument, Unavailable
from services.common.spec import RunSpec
from services.common.threads import in_thread
from services.rollout_gateway.engine.arguments import load_llm
from services.rollout_gateway.engine.versions import VersionHistory
from services.rollout_gateway.spans import Span, Version, spans_between

WARM_UP_TOKENS = 4
WARM_UP_S = 600.0
"""Compiling takes minutes on a large model."""
NO_TRAINER = Version(0, 0)
"""Label of the weights before the first update; only the warm-up runs with them."""
STOP_S = 1.0
"""Time that vLLM's processes get before they are killed; they have nothing to save."""
MAX_SEED = (1 << 63) - 1


class Finish(Enum):
    """Why a response ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw the tokens of one response."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one response; spans count from its first token in this engine."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    spans: list[Span]
    finish: Finish | None


class EngineDied(RuntimeError):
    """vLLM's engine core or a worker is gone; this process cannot go on."""


class VllmEngine:
    """A running engine."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._versions = VersionHistory(llm, NO_TRAINER)
        self.worker_count: int = llm.vllm_config.parallel_config.world_size

    @classmethod
    async def start(cls, spec: RunSpec, worker_extension: str) -> VllmEngine:
        """Load the model in processes of vLLM's own, and run it once so that the first request meets it warm.

        Args:
            spec: The run.
            worker_extension: Dotted name of the class that receives weights in the workers.
        """
        # In a thread for which a stop does not wait, and which stays, since vLLM's processes die with it.
        loading, _ = in_thread(partial(load_llm, spec, worker_extension), "vLLM", stays=True)
        engine = cls(await loading)
        sampling = Sampling(1.0, 1.0, -1, WARM_UP_TOKENS, (), 0)
        async with asyncio.timeout(WARM_UP_S):
            async for _ in engine.generate("warm-up", [0], sampling):
                pass
        # A million objects of vLLM and torch that live as long as we do: the collector need not look at them again.
        gc.freeze()
        return engine

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Delta]:
        """Generate one response. Cancelling the iteration aborts it.

        Raises:
            InvalidArgument: vLLM refuses the request.
            Unavailable: The engine died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        starts = self._versions.begin(request_id)
        position = 0
        try:
            async for output in self._llm.generate(prompt, _sampling_params(sampling), request_id):
                completion = output.outputs[0]
                end = position + len(completion.token_ids)
                finish = Finish(completion.finish_reason) if output.finished else None
                # vLLM 0.24 adds all log-probs of the response to an abort that has no new token.
                log_probs = completion.logprobs.logprobs[: end - position]
                yield Delta(completion.token_ids, log_probs, spans_between(starts, position, end), finish)
                position = end
        except client_error() as error:
            raise InvalidArgument(str(error)) from error
        except EngineDeadError as error:
            raise Unavailable("the engine died") from error
        finally:
            self._versions.end(request_id)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End responses; each yields a last delta with Finish.ABORTED and the tokens so far."""
        await self._llm.abort(list(request_ids))

    async def pause(self) -> None:
        """Freeze running responses; new ones wait."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._llm.resume_generation()

    async def on_workers(self, method: str, *args: Any) -> list[Any]:
        """Results by worker of a method of the worker extension. Raises what vLLM makes of a worker's error."""
        return await self._llm.collective_rpc(method, args=args)

    async def take_version(self, version: Version) -> None:
        """While paused, after the weights have changed: later tokens bear the version and build on nothing older.

        Keys and values of the old weights are dropped; frozen responses are computed anew over their tokens.
        """
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        await self._versions.change(version)

    async def died(self) -> None:
        """Return when vLLM has failed."""
        await asyncio.wait([self._llm.output_handler])

    def is_dead(self) -> bool:
        """True once vLLM has failed."""
        return self._llm.errored

    def stop(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown(timeout=STOP_S)


def _sampling_params(sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed & MAX_SEED,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def client_error() -> type[Exception]:
    """What vLLM raises for a request that it refuses: an error of its own since 0.32, a ValueError before."""
    from vllm import exceptions

    return getattr(exceptions, "VLLMClientError", ValueError)
