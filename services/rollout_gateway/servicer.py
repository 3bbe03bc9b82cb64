"""RolloutGatewayService: protobuf in, protobuf out."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from flotilla.rollout_gateway.v1 import gateway_pb2, gateway_pb2_grpc
from services.common.errors import InvalidArgument, NotFound, Unavailable
from services.common.rpc import duration, seconds
from services.rollout_gateway.codec import engine_from, engine_to, params_from, sample_to
from services.rollout_gateway.generator import Generator
from services.rollout_gateway.group import Group, SampleProgress
from services.rollout_gateway.pool import ENGINE_TTL_S, EnginePool
from services.rollout_gateway.work import WorkLoop

MAX_WAIT_S = 60.0
"""Longest long poll; a longer wish is cut to it."""


class GatewayServicer(gateway_pb2_grpc.RolloutGatewayServiceServicer):
    """The gateway's contract."""

    def __init__(
        self, run_id: str, pool: EnginePool, generator: Generator, work: WorkLoop, stopping: asyncio.Event
    ) -> None:
        self._run_id = run_id
        self._pool = pool
        self._generator = generator
        self._work = work
        self._stopping = stopping

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> gateway_pb2.GenerateResponse:
        self._check(request.run_id)
        group = _group_by_hand(request)
        if not any(engine.serves(None) for engine in self._pool.engines()):
            raise Unavailable("no engine serves")
        await self._generator.generate(group, lambda samples: None, asyncio.Event())
        return gateway_pb2.GenerateResponse(samples=[sample_to(group, sample) for sample in group.samples])

    async def AbortGenerations(
        self, request: gateway_pb2.AbortGenerationsRequest, context: Any
    ) -> gateway_pb2.AbortGenerationsResponse:
        self._check(request.run_id)
        return gateway_pb2.AbortGenerationsResponse(aborted_count=self._work.abort(request.group_ids))

    async def PauseGeneration(
        self, request: gateway_pb2.PauseGenerationRequest, context: Any
    ) -> gateway_pb2.PauseGenerationResponse:
        self._check(request.run_id)
        self._work.set_paused(True)
        return gateway_pb2.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: gateway_pb2.ResumeGenerationRequest, context: Any
    ) -> gateway_pb2.ResumeGenerationResponse:
        self._check(request.run_id)
        self._work.set_paused(False)
        return gateway_pb2.ResumeGenerationResponse()

    async def RegisterEngine(
        self, request: gateway_pb2.RegisterEngineRequest, context: Any
    ) -> gateway_pb2.RegisterEngineResponse:
        self._check(request.run_id)
        self._pool.register(engine_from(request.engine))
        return gateway_pb2.RegisterEngineResponse(ttl=duration(ENGINE_TTL_S))

    async def RenewEngine(
        self, request: gateway_pb2.RenewEngineRequest, context: Any
    ) -> gateway_pb2.RenewEngineResponse:
        self._check(request.run_id)
        self._pool.renew(engine_from(request.engine))
        return gateway_pb2.RenewEngineResponse(ttl=duration(ENGINE_TTL_S))

    async def ListEngines(
        self, request: gateway_pb2.ListEnginesRequest, context: Any
    ) -> gateway_pb2.ListEnginesResponse:
        self._check(request.run_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds(request.wait_timeout), MAX_WAIT_S)):
                while request.known_revision == self._pool.table.revision and not self._stopping.is_set():
                    await self._pool.change()
        engines = [engine_to(engine) for engine in self._pool.engines()]
        return gateway_pb2.ListEnginesResponse(engines=engines, revision=self._pool.table.revision)

    async def SetConcurrency(
        self, request: gateway_pb2.SetConcurrencyRequest, context: Any
    ) -> gateway_pb2.SetConcurrencyResponse:
        self._check(request.run_id)
        if request.server_concurrency < 1:
            raise InvalidArgument("server_concurrency must be at least 1", field="server_concurrency")
        self._pool.router.limit = request.server_concurrency
        self._pool.notify()
        return gateway_pb2.SetConcurrencyResponse()

    async def GetGatewayStats(
        self, request: gateway_pb2.GetGatewayStatsRequest, context: Any
    ) -> gateway_pb2.GetGatewayStatsResponse:
        self._check(request.run_id)
        router = self._pool.router
        loads = [
            gateway_pb2.EngineLoad(
                engine_id=engine.engine_id, running_samples=router.load(engine), server_concurrency=router.limit
            )
            for engine in self._pool.engines()
        ]
        return gateway_pb2.GetGatewayStatsResponse(
            running_groups=self._work.running_groups,
            engines=loads,
            finished_samples=self._generator.finished_samples,
            generated_tokens=self._generator.generated_tokens,
            lost_leases=self._work.lost_leases,
            paused=self._work.paused,
        )

    def _check(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise NotFound(f"this gateway belongs to run {self._run_id}, not to {run_id!r}")
        if self._stopping.is_set():
            raise Unavailable("the gateway is stopping")


def _group_by_hand(request: gateway_pb2.GenerateRequest) -> Group:
    if not request.prompt_token_ids:
        raise InvalidArgument("the prompt is empty", field="prompt_token_ids")
    if request.sample_count < 1:
        raise InvalidArgument("sample_count must be at least 1", field="sample_count")
    samples = [SampleProgress(index, request.seed + index) for index in range(request.sample_count)]
    params = params_from(request.sampling_params)
    return Group(f"by-hand/{request.request_id}", tuple(request.prompt_token_ids), params, samples)
