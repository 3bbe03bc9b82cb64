"""EngineService: protobuf in, protobuf out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2, engine_pb2_grpc
from services.common.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from services.common.rpc import seconds
from services.rollout_gateway.codec import spans_to, version_from, version_to
from services.rollout_gateway.engine.generation import Generations, GroupSpec, SampleSpec
from services.rollout_gateway.engine.state import Hold, ServingState
from services.rollout_gateway.engine.updates import WeightUpdates
from services.rollout_gateway.engine.vllm_engine import Delta, Finish, Sampling, VllmEngine

FINISH_TO = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: common_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    Finish.ABORTED: common_pb2.FINISH_REASON_ABORTED,
}


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """The engine's contract."""

    def __init__(
        self,
        run_id: str,
        engine: VllmEngine,
        generations: Generations,
        state: ServingState,
        updates: WeightUpdates,
        stopping: asyncio.Event,
    ) -> None:
        self._run_id = run_id
        self._engine = engine
        self._generations = generations
        self._state = state
        self._updates = updates
        self._stopping = stopping

    async def Generate(
        self, request: engine_pb2.EngineServiceGenerateRequest, context: Any
    ) -> AsyncIterator[engine_pb2.EngineServiceGenerateResponse]:
        self._check(request.run_id)
        self._check_version(request)
        async for deltas in self._generations.run(_group_from(request)):
            yield _response_to(deltas)

    async def Abort(self, request: engine_pb2.AbortRequest, context: Any) -> engine_pb2.AbortResponse:
        self._check(request.run_id)
        return engine_pb2.AbortResponse(aborted_count=await self._generations.abort(request.group_ids))

    async def Pause(self, request: engine_pb2.PauseRequest, context: Any) -> engine_pb2.PauseResponse:
        self._check(request.run_id)
        await self._state.pause(Hold.BY_HAND)
        return engine_pb2.PauseResponse()

    async def Resume(self, request: engine_pb2.ResumeRequest, context: Any) -> engine_pb2.ResumeResponse:
        self._check(request.run_id)
        await self._state.resume(Hold.BY_HAND)
        return engine_pb2.ResumeResponse()

    async def StartWeightUpdate(
        self, request: engine_pb2.StartWeightUpdateRequest, context: Any
    ) -> engine_pb2.StartWeightUpdateResponse:
        self._check(request.run_id)
        if not request.session_id or not request.HasField("version"):
            raise InvalidArgument("session_id and version must be set", field="session_id")
        timeout_s = seconds(request.session_timeout)
        version = version_from(request.version)
        await self._updates.start(request.session_id, version, timeout_s, request.SerializeToString())
        return engine_pb2.StartWeightUpdateResponse()

    async def ReceiveWeights(
        self, request: engine_pb2.ReceiveWeightsRequest, context: Any
    ) -> engine_pb2.ReceiveWeightsResponse:
        self._check(request.run_id)
        received = await self._updates.receive(request.session_id)
        return engine_pb2.ReceiveWeightsResponse(digests=received.digests, wire_seconds=received.wire_seconds)

    async def FinishWeightUpdate(
        self, request: engine_pb2.FinishWeightUpdateRequest, context: Any
    ) -> engine_pb2.FinishWeightUpdateResponse:
        self._check(request.run_id)
        loaded = await self._updates.finish(request.session_id)
        return engine_pb2.FinishWeightUpdateResponse(
            load_seconds=loaded.load_seconds, pause_seconds=loaded.pause_seconds
        )

    async def AbortWeightUpdate(
        self, request: engine_pb2.AbortWeightUpdateRequest, context: Any
    ) -> engine_pb2.AbortWeightUpdateResponse:
        self._check(request.run_id)
        await self._updates.abort(request.session_id)
        return engine_pb2.AbortWeightUpdateResponse()

    async def GetWeightVersion(
        self, request: engine_pb2.GetWeightVersionRequest, context: Any
    ) -> engine_pb2.GetWeightVersionResponse:
        self._check(request.run_id)
        version = self._state.version
        return engine_pb2.GetWeightVersionResponse(
            version=version_to(version) if version else None, digest=self._updates.digest
        )

    async def GetParameterManifest(
        self, request: engine_pb2.GetParameterManifestRequest, context: Any
    ) -> engine_pb2.GetParameterManifestResponse:
        self._check(request.run_id)
        manifests = await self._engine.on_workers("weight_sync_manifest")
        parameters = [engine_pb2.ManifestParameter(**entry) for entry in manifests[0]]
        return engine_pb2.GetParameterManifestResponse(parameters=parameters)

    async def GetEngineStats(
        self, request: engine_pb2.GetEngineStatsRequest, context: Any
    ) -> engine_pb2.GetEngineStatsResponse:
        self._check(request.run_id)
        return engine_pb2.GetEngineStatsResponse(
            running_samples=self._generations.running_samples,
            generated_tokens=self._generations.generated_tokens,
            paused=self._state.paused,
            weight_updates=self._updates.finished,
        )

    def _check(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise NotFound(f"this engine belongs to run {self._run_id}, not to {run_id!r}")
        if self._stopping.is_set():
            raise Unavailable("the engine is stopping")

    def _check_version(self, request: engine_pb2.EngineServiceGenerateRequest) -> None:
        version = self._state.version
        if version is None:
            raise FailedPrecondition("the engine has no weights of the run yet")
        if request.HasField("required_version") and version_from(request.required_version) != version:
            raise FailedPrecondition(
                f"the engine serves version {version}, not {version_from(request.required_version)}"
            )


def _group_from(request: engine_pb2.EngineServiceGenerateRequest) -> GroupSpec:
    if not request.prompt_token_ids:
        raise InvalidArgument("the prompt is empty", field="prompt_token_ids")
    if not request.samples:
        raise InvalidArgument("no sample is asked for", field="samples")
    params = request.sampling_params
    return GroupSpec(
        request.group_id,
        tuple(request.prompt_token_ids),
        Sampling(
            params.temperature, params.top_p, params.top_k, params.max_response_tokens, tuple(params.stop_token_ids), 0
        ),
        tuple(SampleSpec(one.sample_index, tuple(one.response_token_ids), one.seed) for one in request.samples),
    )


def _response_to(deltas: Mapping[int, Delta]) -> engine_pb2.EngineServiceGenerateResponse:
    return engine_pb2.EngineServiceGenerateResponse(
        deltas=[
            engine_pb2.SampleDelta(
                sample_index=index,
                token_ids=delta.token_ids,
                log_probs=delta.log_probs,
                policy_spans=spans_to(delta.spans),
                finish_reason=FINISH_TO[delta.finish],
            )
            for index, delta in deltas.items()
        ]
    )
