"""vLLM's AsyncLLM: token ids in, token deltas with log-probs and policy spans out. The only module that imports vLLM.

Written for vLLM 0.32. Two of its inner workings are relied upon, both in `_starts`: the output processor notes for each
request at which token the weight version changed, and it does so from the label that the engine core puts on every
step. This makes policy spans exact whatever is buffered on the way.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from services.common.errors import InvalidArgument, Unavailable
from services.common.spec import RunSpec
from services.rollout_gateway.spans import Span, Start, Version, spans_between

STREAM_INTERVAL_TOKENS = 16
"""vLLM hands out tokens of a running request in portions of this size: each portion wakes a task."""
MIN_BATCHED_TOKENS = 8192
"""Tokens of one step when prompts are never split."""
WARM_UP_TOKENS = 4
NO_TRAINER = Version(0, 0)
"""Label of the weights before the first update; only the warm-up runs with them."""
STOP_S = 1.0
"""Time that vLLM's processes get before they are killed; they have nothing to save."""
GIB = 1 << 30
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
        self.worker_count: int = llm.vllm_config.parallel_config.world_size

    @classmethod
    async def start(cls, spec: RunSpec, worker_extension: str) -> VllmEngine:
        """Load the model in processes of vLLM's own, and run it once so that the first request meets it warm.

        Args:
            spec: The run.
            worker_extension: Dotted name of the class that receives weights in the workers.
        """
        engine = cls(await asyncio.to_thread(_load, spec, worker_extension))
        await engine._llm.update_weight_version(str(NO_TRAINER))
        sampling = Sampling(1.0, 1.0, -1, WARM_UP_TOKENS, (), 0)
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
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
        position = 0
        try:
            async for output in self._llm.generate(prompt, _sampling_params(sampling), request_id):
                completion = output.outputs[0]
                end = position + len(completion.token_ids)
                spans = spans_between(self._starts(request_id, completion), position, end)
                finish = Finish(completion.finish_reason) if output.finished else None
                yield Delta(completion.token_ids, completion.logprobs.logprobs, spans, finish)
                position = end
        except VLLMClientError as error:
            raise InvalidArgument(str(error)) from error
        except EngineDeadError as error:
            raise Unavailable("the engine died") from error

    def _starts(self, request_id: str, completion: Any) -> list[Start]:
        if completion.finish_reason is not None:
            found = [(span.version, span.start) for span in completion.weight_versions or ()]
        else:
            processor = self._llm.output_processor
            (inner_id,) = processor.external_req_ids[request_id]
            found = processor.request_states[inner_id].weight_version_starts
        return [(Version.parse(label), start) for label, start in found]

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
        await self._llm.update_weight_version(str(version))

    async def died(self) -> None:
        """Return when vLLM has failed."""
        await asyncio.wait([self._llm.output_handler])

    def is_dead(self) -> bool:
        """True once vLLM has failed."""
        return self._llm.errored

    def stop(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown(timeout=STOP_S)


def _load(spec: RunSpec, worker_extension: str) -> Any:
    # vLLM reads these when it is imported. Its processes are spawned: a fork would copy the gRPC server.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Threads that spin while they wait for each other halve the speed where other services want the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if spec.engine.num_threads:
        os.environ["OMP_NUM_THREADS"] = str(spec.engine.num_threads)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(spec.model.hf_checkpoint),
        dtype=spec.engine.dtype,
        max_model_len=spec.engine.max_model_len,
        max_num_seqs=spec.engine.max_num_seqs,
        enforce_eager=spec.engine.enforce_eager,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=worker_extension,
        seed=spec.rollout.seed,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **(_cpu_arguments(spec) if current_platform.is_cpu() else {}),
    )
    return AsyncLLM.from_engine_args(arguments)


def _cpu_arguments(spec: RunSpec) -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": int(spec.engine.kv_cache_gib * GIB),
        # vLLM 0.32 on CPU dies when it splits the prompt of a request that has a seed.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(spec.engine.max_model_len, MIN_BATCHED_TOKENS),
    }


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
        stream_interval=STREAM_INTERVAL_TOKENS,
        skip_clone=True,
    )
