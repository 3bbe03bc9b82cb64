"""Scripted peers of the gateway: a buffer and engines that are real gRPC servers, but only do what a test tells them.

The scripted engine answers token 100 + k as the k-th response token (from 0), with log-prob -(k + 1).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from services.common.board import StatusBoard
from services.common.errors import Aborted, FailedPrecondition, FlotillaError, Unavailable
from services.common.rpc import bind_server, duration, make_server, open_channel
from services.common.spec import RunSpec
from services.rollout_gateway.generator import Generator
from services.rollout_gateway.pool import EnginePool
from services.rollout_gateway.registry import Engine, EngineState
from services.rollout_gateway.servicer import GatewayServicer
from services.rollout_gateway.spans import Version
from services.rollout_gateway.work import WorkLoop
from tests.conftest import free_ports

WAIT_S = 10.0
V1 = Version(1, 0)
V2 = Version(1, 1)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of this event loop, at most WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  any condition, not one with an event
            await asyncio.sleep(0.005)


# Only the methods that the gateway calls are scripted; to a type checker the full contracts are abstract.
EngineService: Any = engine_pb2_grpc.EngineServiceServicer
BufferService: Any = buffer_pb2_grpc.BufferServiceServicer
RunRegistryService: Any = registry_pb2_grpc.RunRegistryServiceServicer


class ScriptedEngine(EngineService):
    """Streams one token a message for every sample, until `length` tokens."""

    def __init__(self, version: Version = V1, length: int = 4, stops_early: dict[int, int] | None = None) -> None:
        self.version = version
        self.length = length
        self.stops_early = stops_early or {}
        """Length of samples that end with a stop token, by index."""
        self.hold_at = -1
        """Position before which streams wait for `go`."""
        self.go = asyncio.Event()
        self.errors: list[FlotillaError] = []
        """Answers to the next calls, before any token."""
        self.requests: list[engine_pb2.EngineServiceGenerateRequest] = []
        self.dropped = 0

    async def Generate(self, request, context):
        self.requests.append(request)
        if self.errors:
            raise self.errors.pop(0)
        try:
            async for response in self._stream(request):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            self.dropped += 1
            raise

    async def _stream(self, request) -> AsyncIterator[engine_pb2.EngineServiceGenerateResponse]:
        begins = {sample.sample_index: len(sample.response_token_ids) for sample in request.samples}
        for position in range(min(begins.values()), self.length):
            if position == self.hold_at:
                await self.go.wait()
            deltas = [self._delta(index, position, begin) for index, begin in begins.items() if position >= begin]
            alive = [delta for delta in deltas if position < self._length(delta.sample_index)]
            yield engine_pb2.EngineServiceGenerateResponse(deltas=alive)

    def _length(self, index: int) -> int:
        return self.stops_early.get(index, self.length)

    def _delta(self, index: int, position: int, begin: int) -> engine_pb2.SampleDelta:
        reason = common_pb2.FINISH_REASON_STOP if index in self.stops_early else common_pb2.FINISH_REASON_LENGTH
        last = position == self._length(index) - 1
        version = common_pb2.PolicyVersion(run_epoch=self.version.run_epoch, step=self.version.step)
        span = common_pb2.PolicySpan(begin=position - begin, end=position - begin + 1, version=version)
        return engine_pb2.SampleDelta(
            sample_index=index,
            token_ids=[100 + position],
            log_probs=[-(position + 1.0)],
            policy_spans=[span],
            finish_reason=reason if last else common_pb2.FINISH_REASON_UNSPECIFIED,
        )


class ScriptedBuffer(BufferService, RunRegistryService):
    """Hands out the leases that a test puts in, and writes down what comes back."""

    def __init__(self) -> None:
        self.to_lease: list[buffer_pb2.WorkLease] = []
        self.added = asyncio.Event()
        self.lease_requests: list[buffer_pb2.LeaseWorkRequest] = []
        self.submits: list[buffer_pb2.SubmitSamplesRequest] = []
        self.releases: list[buffer_pb2.ReleaseLeaseRequest] = []
        self.renewals = 0
        self.stop_reason = buffer_pb2.STOP_REASON_UNSPECIFIED
        self.lost = False
        self.away = False
        self.refuses_run = False
        self.ttl_s = 0.3

    def add(self, lease: buffer_pb2.WorkLease) -> None:
        """Work for the next LeaseWork."""
        self.to_lease.append(lease)
        self.added.set()

    @property
    def submitted(self) -> dict[int, common_pb2.Sample]:
        """Samples that were handed in, by index."""
        return {sample.sample_index: sample for submit in self.submits for sample in submit.samples}

    async def RegisterRun(self, request, context):
        if self.refuses_run:
            raise FailedPrecondition("the run has another spec")
        return registry_pb2.RegisterRunResponse(run=registry_pb2.Run(run_id=request.run_id))

    async def LeaseWork(self, request, context):
        self._check(None)
        self.lease_requests.append(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.wait_timeout.ToSeconds()):
                await self.added.wait()
        leases, self.to_lease = self.to_lease[: request.max_groups], self.to_lease[request.max_groups :]
        if not self.to_lease:
            self.added.clear()
        return buffer_pb2.LeaseWorkResponse(leases=leases)

    async def RenewLease(self, request, context):
        self._check(request.lease_token)
        self.renewals += 1
        return buffer_pb2.RenewLeaseResponse(ttl=duration(self.ttl_s), stop_reason=self.stop_reason)

    async def SubmitSamples(self, request, context):
        self._check(request.lease_token)
        self.submits.append(request)
        return buffer_pb2.SubmitSamplesResponse()

    async def ReleaseLease(self, request, context):
        self._check(request.lease_token)
        self.releases.append(request)
        return buffer_pb2.ReleaseLeaseResponse()

    def _check(self, token: bytes | None) -> None:
        if self.away:
            raise Unavailable("Redis is away")
        if self.lost and token is not None:
            raise Aborted("the lease was lost")


def make_lease(
    group_id: str = "g0",
    samples: int = 2,
    ttl_s: float = 0.3,
    required: Version | None = None,
    partial: common_pb2.Sample | None = None,
) -> buffer_pb2.WorkLease:
    """A lease of `samples` fresh samples, or of one that is continued."""
    pending = [partial] if partial else [common_pb2.Sample(sample_index=index) for index in range(samples)]
    version = common_pb2.PolicyVersion(run_epoch=required.run_epoch, step=required.step) if required else None
    return buffer_pb2.WorkLease(
        lease_token=group_id.encode(),
        group_id=group_id,
        attempt=1,
        ttl=duration(ttl_s),
        prompt_token_ids=[7, 8, 9],
        sampling_params=common_pb2.SamplingParams(temperature=1, top_p=1, top_k=-1, max_response_tokens=16),
        pending_samples=pending,
        seed=1000,
        required_version=version,
    )


@dataclass
class World:
    """A gateway in this process, with its peers."""

    buffer: ScriptedBuffer
    pool: EnginePool
    generator: Generator
    work: WorkLoop
    stub: gateway_pb2_grpc.RolloutGatewayServiceAsyncStub
    stopping: asyncio.Event
    _stack: contextlib.AsyncExitStack
    _servers: dict[str, grpc.aio.Server] = field(default_factory=dict)

    async def add_engine(self, engine: ScriptedEngine, name: str = "engine-0") -> Engine:
        """Start an engine and register it."""
        (port,) = free_ports(1)
        server = make_server()
        engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
        bind_server(server, "127.0.0.1", port)
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        entry = Engine(name, f"{name}:{port}", f"127.0.0.1:{port}", EngineState.SERVING, engine.version, 1)
        self._servers[entry.incarnation] = server
        self.pool.register(entry)
        return entry

    async def kill(self, engine: Engine) -> None:
        """Cut every connection of an engine, as its death would."""
        await self._servers[engine.incarnation].stop(None)


def make_spec(buffer_port: int, n_samples: int = 2, concurrency: int = 64) -> RunSpec:
    """The spec of a run whose buffer listens on a port."""
    return RunSpec.model_validate(
        {
            "run_id": "r",
            "model": {"hf_checkpoint": "none"},
            "data": {"prompt_data": "none", "max_prompt_tokens": 8},
            "rollout": {
                "num_rollout": 1,
                "rollout_batch_size": 4,
                "n_samples_per_prompt": n_samples,
                "max_response_tokens": 16,
            },
            "engine": {"server_concurrency": concurrency},
            "services": {"buffer": {"grpc_port": buffer_port, "http_port": 1}},
        }
    )


@contextlib.asynccontextmanager
async def gateway(n_samples: int = 2, concurrency: int = 64, *, works: bool = True) -> AsyncIterator[World]:
    """A gateway with a scripted buffer and no engine yet; `works` runs its work loop."""
    async with contextlib.AsyncExitStack() as stack:
        buffer_port, own_port = free_ports(2)
        buffer = ScriptedBuffer()
        server = make_server()
        buffer_pb2_grpc.add_BufferServiceServicer_to_server(buffer, server)
        registry_pb2_grpc.add_RunRegistryServiceServicer_to_server(buffer, server)
        bind_server(server, "127.0.0.1", buffer_port)
        await server.start()
        stack.push_async_callback(server.stop, None)
        spec, board = make_spec(buffer_port, n_samples, concurrency), StatusBoard("gateway")
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{buffer_port}"))
        pool = EnginePool(concurrency, board)
        generator = Generator(spec.run_id, pool)
        work = WorkLoop(
            spec,
            buffer_pb2_grpc.BufferServiceStub(channel),
            registry_pb2_grpc.RunRegistryServiceStub(channel),
            pool,
            generator,
            board,
        )
        stopping = asyncio.Event()
        own = make_server()
        servicer = GatewayServicer(spec.run_id, pool, generator, work, stopping)
        gateway_pb2_grpc.add_RolloutGatewayServiceServicer_to_server(servicer, own)
        bind_server(own, "127.0.0.1", own_port)
        await own.start()
        stack.push_async_callback(own.stop, None)
        own_channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{own_port}"))
        stub = gateway_pb2_grpc.RolloutGatewayServiceStub(own_channel)
        world = World(buffer, pool, generator, work, stub, stopping, stack)
        expiring = asyncio.create_task(pool.expire())
        stack.push_async_callback(ended, expiring)
        if works:
            working = asyncio.create_task(work.run())
            stack.push_async_callback(ended, working)
        yield world


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def engine_message(name: str = "engine-0", incarnation: str = "a", step: int = 0) -> gateway_pb2.Engine:
    """An engine as it would describe itself."""
    return gateway_pb2.Engine(
        engine_id=name,
        incarnation=incarnation,
        address="127.0.0.1:1",
        state=gateway_pb2.ENGINE_STATE_SERVING,
        version=common_pb2.PolicyVersion(run_epoch=1, step=step),
        worker_count=1,
    )
