"""Scripted peers of the gateway: a buffer and engines that are real gRPC servers, but only do what a test tells them.

The scripted engine answers token 100 + k as the k-th response token (from 0), with log-prob -(k + 1). The scripted
buffer keeps saved tokens as the contract says, and refuses fragments that do not follow from what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from services.common.board import StatusBoard
from services.common.errors import Aborted, FailedPrecondition, FlotillaError, InvalidArgument, Unavailable
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


async def either(*events: asyncio.Event) -> None:
    """Wait for the first of several events."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()


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
        self.unflushed = 0
        """Tokens of each sample that it has generated, but not sent, while it waits."""
        self.errors: list[FlotillaError] = []
        """Answers to the next calls, before any token."""
        self.requests: list[engine_pb2.EngineServiceGenerateRequest] = []
        self.dropped = 0
        """Streams that were cut."""
        self.aborts: list[engine_pb2.AbortRequest] = []
        self.ignores_aborts = False
        self._aborting: dict[str, asyncio.Event] = {}

    async def Abort(self, request, context):
        self.aborts.append(request)
        for group_id in [] if self.ignores_aborts else request.group_ids:
            self._aborting[group_id].set()
        return engine_pb2.AbortResponse()

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
        aborting = self._aborting[request.group_id] = asyncio.Event()
        begins = {sample.sample_index: len(sample.response_token_ids) for sample in request.samples}
        for position in range(min(begins.values()), self.length):
            if position == self.hold_at:
                await either(self.go, aborting)
            if aborting.is_set():
                for late in range(position, position + self.unflushed):
                    yield self._response(begins, late)
                yield self._aborted(begins, position + self.unflushed)
                return
            yield self._response(begins, position)

    def _response(self, begins: dict[int, int], position: int) -> engine_pb2.EngineServiceGenerateResponse:
        deltas = [
            self._delta(index, position, begin)
            for index, begin in begins.items()
            if begin <= position < self._length(index)
        ]
        return engine_pb2.EngineServiceGenerateResponse(deltas=deltas)

    def _aborted(self, begins: dict[int, int], position: int) -> engine_pb2.EngineServiceGenerateResponse:
        reason = common_pb2.FINISH_REASON_ABORTED
        ends = [
            engine_pb2.SampleDelta(sample_index=index, finish_reason=reason)
            for index in begins
            if position < self._length(index)
        ]
        return engine_pb2.EngineServiceGenerateResponse(deltas=ends)

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


Fragments = list[buffer_pb2.SampleFragment]


class ScriptedBuffer(BufferService, RunRegistryService):
    """Hands out the leases that a test puts in, and writes down what comes back."""

    def __init__(self) -> None:
        self.to_lease: list[buffer_pb2.WorkLease] = []
        self.added = asyncio.Event()
        self.lease_requests: list[buffer_pb2.LeaseWorkRequest] = []
        self.submits: list[buffer_pb2.SubmitSamplesRequest] = []
        self.releases: list[buffer_pb2.ReleaseLeaseRequest] = []
        self.renew_requests: list[buffer_pb2.RenewLeaseRequest] = []
        """Every one that came in, repeats too."""
        self.renewals = 0
        """Those that were answered."""
        self.lost_answers = 0
        """So many of the next renewals count, but their answers are lost."""
        self.partial: dict[tuple[str, int], Fragments] = {}
        """Saved tokens of unfinished samples, by group and index."""
        self.watches: list[buffer_pb2.WatchWorkRequest] = []
        self.break_watch = asyncio.Event()
        self.stops: list[buffer_pb2.Stop] = []
        self.stopped = asyncio.Event()
        self.stop_reason = buffer_pb2.STOP_REASON_UNSPECIFIED
        self.lost = False
        self.away = False
        self.refuses_run = False
        self.ttl_s = 0.3

    def add(self, lease: buffer_pb2.WorkLease) -> None:
        """Work for the next LeaseWork."""
        self.to_lease.append(lease)
        self.added.set()

    def stop(self, group_id: str, reason: buffer_pb2.StopReason = buffer_pb2.STOP_REASON_SEALED) -> None:
        """Say to whoever watches that a lease of `make_lease` must stop."""
        self.stops.append(buffer_pb2.Stop(lease_token=group_id.encode(), group_id=group_id, reason=reason))
        self.stopped.set()
        self.stopped = asyncio.Event()

    def add_again(self, lease: buffer_pb2.WorkLease) -> None:
        """The same work under a new lease: what was not submitted, with what was saved."""
        again = buffer_pb2.WorkLease()
        again.CopyFrom(lease)
        del again.pending_samples[:]
        for sample in lease.pending_samples:
            if sample.sample_index not in self.submitted:
                saved = common_pb2.Sample(sample_index=sample.sample_index)
                for one in self.partial[lease.group_id, sample.sample_index]:
                    saved.response_token_ids.extend(one.response_token_ids)
                    saved.rollout_log_probs.extend(one.rollout_log_probs)
                    saved.policy_spans.extend(one.policy_spans)
                again.pending_samples.append(saved)
        self.add(again)

    @property
    def submitted(self) -> dict[int, common_pb2.Sample]:
        """Samples that were handed in, by index."""
        return {sample.sample_index: sample for submit in self.submits for sample in submit.samples}

    def saved(self, group_id: str = "g0") -> dict[int, list[int]]:
        """Saved tokens of unfinished samples, by index."""
        return {
            index: [token for fragment in fragments for token in fragment.response_token_ids]
            for (group, index), fragments in self.partial.items()
            if group == group_id
        }

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
        for lease in leases:
            self.partial |= {(lease.group_id, one.sample_index): _given(one) for one in lease.pending_samples}
        return buffer_pb2.LeaseWorkResponse(leases=leases)

    async def WatchWork(self, request, context):
        self._check(None)
        self.watches.append(request)
        said = 0
        while not self.break_watch.is_set():
            if said < len(self.stops):
                yield buffer_pb2.WatchWorkResponse(stops=self.stops[said:])
                said = len(self.stops)
            await either(self.stopped, self.break_watch)
        self.break_watch.clear()
        raise Unavailable("the stream breaks")

    async def RenewLease(self, request, context):
        self._check(request.lease_token)
        self.renew_requests.append(request)
        self._save(request.group_id, request.progress)
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("the answer is lost")
        self.renewals += 1
        return buffer_pb2.RenewLeaseResponse(ttl=duration(self.ttl_s), stop_reason=self.stop_reason)

    async def SubmitSamples(self, request, context):
        self._check(request.lease_token)
        self.submits.append(request)
        for sample in request.samples:
            self.partial.pop((request.group_id, sample.sample_index), None)
        return buffer_pb2.SubmitSamplesResponse()

    async def ReleaseLease(self, request, context):
        self._check(request.lease_token)
        self._save(request.group_id, request.progress)
        self.releases.append(request)
        return buffer_pb2.ReleaseLeaseResponse()

    def _save(self, group_id: str, progress: Iterable[buffer_pb2.SampleFragment]) -> None:
        for one in progress:
            earlier = self.partial.get((group_id, one.sample_index))
            if earlier is None:
                continue  # the sample was submitted meanwhile
            boundaries = {0, *(boundary for fragment in earlier for boundary in _bounds(fragment))}
            if one.begin not in boundaries:
                raise InvalidArgument(f"a fragment begins at {one.begin}, where none began or ended")
            if [span.begin for span in one.policy_spans][:1] != [one.begin]:
                raise InvalidArgument("the spans do not begin where the fragment does")
            before = [fragment for fragment in earlier if _bounds(fragment)[1] <= one.begin]
            self.partial[group_id, one.sample_index] = [*before, one]

    def _check(self, token: bytes | None) -> None:
        if self.away:
            raise Unavailable("Redis is away")
        if self.lost and token is not None:
            raise Aborted("the lease was lost")


def _bounds(fragment: buffer_pb2.SampleFragment) -> tuple[int, int]:
    return fragment.begin, fragment.begin + len(fragment.response_token_ids)


def _given(sample: common_pb2.Sample) -> Fragments:
    """What a lease brings, as the fragment that it was saved as."""
    given = buffer_pb2.SampleFragment(
        response_token_ids=sample.response_token_ids,
        rollout_log_probs=sample.rollout_log_probs,
        policy_spans=sample.policy_spans,
    )
    return [given] if given.response_token_ids else []


def make_lease(
    group_id: str = "g0",
    samples: int = 2,
    ttl_s: float = 0.3,
    required: Version | None = None,
    partial: common_pb2.Sample | None = None,
    *,
    continues: bool = False,
    masks: bool = False,
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
        continue_across_versions=continues,
        mask_offpolicy_tokens=masks,
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
        server = await self._stack.enter_async_context(served(port, engine))
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


SERVICES = {
    ScriptedEngine: [engine_pb2_grpc.add_EngineServiceServicer_to_server],
    ScriptedBuffer: [
        buffer_pb2_grpc.add_BufferServiceServicer_to_server,
        registry_pb2_grpc.add_RunRegistryServiceServicer_to_server,
    ],
    GatewayServicer: [gateway_pb2_grpc.add_RolloutGatewayServiceServicer_to_server],
}


@contextlib.asynccontextmanager
async def served(port: int, servicer: Any) -> AsyncIterator[grpc.aio.Server]:
    """A servicer of this module, or the gateway's, behind gRPC."""
    server = make_server()
    for add in SERVICES[type(servicer)]:
        add(servicer, server)
    bind_server(server, "127.0.0.1", port)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def gateway(n_samples: int = 2, concurrency: int = 64, *, works: bool = True) -> AsyncIterator[World]:
    """A gateway with a scripted buffer and no engine yet; `works` runs its work loop."""
    async with contextlib.AsyncExitStack() as stack:
        buffer_port, own_port = free_ports(2)
        buffer = ScriptedBuffer()
        await stack.enter_async_context(served(buffer_port, buffer))
        spec, board = make_spec(buffer_port, n_samples, concurrency), StatusBoard("gateway")
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{buffer_port}"))
        pool = EnginePool(concurrency, board)
        generator = Generator(spec.run_id, pool)
        work = WorkLoop(spec, channel, pool, generator, board)
        stopping = asyncio.Event()
        servicer = GatewayServicer(spec.run_id, pool, generator, work, stopping)
        await stack.enter_async_context(served(own_port, servicer))
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
