"""The buffer as the gateway uses it: calls are repeated unchanged while it is away or slow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.common.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from services.common.rpc import call, duration, from_rpc_error, new_request_id
from services.common.service import Backoff, now_s
from services.rollout_gateway.codec import fragment_to, sample_to
from services.rollout_gateway.group import Fragment, Group, SampleProgress

POLL_S = 10.0
"""How long LeaseWork may wait at the buffer."""
WATCH_S = 60.0
"""Deadline of one watch."""
CALL_TIMEOUT_S = 15.0
PATIENCE_S = 600.0
"""How long a call is repeated while the buffer is away; a run survives a restart of its Redis."""
PORTION_TOKENS = 1 << 20
"""Tokens of one call, at most ten bytes each: far below the limit of a message."""

R = TypeVar("R")
T = TypeVar("T")


def portions(items: Sequence[T], tokens: Callable[[T], int]) -> list[list[T]]:
    """Items in order, in lists of at most PORTION_TOKENS; a longer item goes alone."""
    result: list[list[T]] = []
    room = 0
    for item in items:
        if not result or tokens(item) > room:
            result.append([])
            room = PORTION_TOKENS
        result[-1].append(item)
        room -= tokens(item)
    return result


class BufferClient:
    """One run's buffer, to one gateway. Methods raise the errors of the contract, and the last one after PATIENCE_S."""

    def __init__(self, run_id: str, worker_id: str, channel: grpc.aio.Channel) -> None:
        self._run_id = run_id
        self._worker_id = worker_id
        self._work = buffer_pb2_grpc.BufferServiceStub(channel)
        self._runs = registry_pb2_grpc.RunRegistryServiceStub(channel)

    async def register(self, spec_digest: str) -> None:
        """Agree on the run. FailedPrecondition if the buffer has another spec under this run_id."""
        await _insist(self._runs.RegisterRun, registry_pb2.RegisterRunRequest(**self._ids(), spec_digest=spec_digest))

    async def lease_work(self, max_groups: int) -> list[buffer_pb2.WorkLease]:
        """At most `max_groups` leases; none if there is no work within POLL_S."""
        request = buffer_pb2.LeaseWorkRequest(
            **self._ids(), worker_id=self._worker_id, max_groups=max_groups, wait_timeout=duration(POLL_S)
        )
        return list((await _insist(self._work.LeaseWork, request)).leases)

    async def watch(self) -> AsyncIterator[buffer_pb2.Stop]:
        """Leases of this gateway that must stop. DeadlineExceeded after WATCH_S; not repeated."""
        request = buffer_pb2.WatchWorkRequest(run_id=self._run_id, worker_id=self._worker_id)
        try:
            async for response in self._work.WatchWork(request, timeout=WATCH_S):
                for stop in response.stops:
                    yield stop
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def renew(self, token: bytes, group: Group, progress: Sequence[Fragment]) -> buffer_pb2.RenewLeaseResponse:
        """Keep a lease, and save tokens."""
        request = buffer_pb2.RenewLeaseRequest(
            **self._ids(), lease_token=token, group_id=group.group_id, progress=map(fragment_to, progress)
        )
        return await _insist(self._work.RenewLease, request)

    async def submit(self, token: bytes, group: Group, samples: Sequence[SampleProgress]) -> None:
        """Hand in finished samples."""
        request = buffer_pb2.SubmitSamplesRequest(
            **self._ids(),
            lease_token=token,
            group_id=group.group_id,
            samples=[sample_to(group, sample) for sample in samples],
        )
        await _insist(self._work.SubmitSamples, request)

    async def release(self, token: bytes, group: Group, error: str, progress: Sequence[Fragment]) -> None:
        """Give a lease back, with tokens to save; `error` says what went wrong, if anything did."""
        request = buffer_pb2.ReleaseLeaseRequest(
            **self._ids(), lease_token=token, group_id=group.group_id, error=error, progress=map(fragment_to, progress)
        )
        await _insist(self._work.ReleaseLease, request)

    def _ids(self) -> dict[str, str]:
        return {"run_id": self._run_id, "request_id": new_request_id()}


async def _insist(method: Callable[..., Awaitable[R]], request: Any) -> R:
    give_up = now_s() + PATIENCE_S
    backoff = Backoff()
    while True:
        try:
            return await call(method, request, timeout_s=CALL_TIMEOUT_S)
        except (Unavailable, DeadlineExceeded, ResourceExhausted):
            if now_s() > give_up:
                raise
        await backoff.wait()
