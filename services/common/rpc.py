"""gRPC bootstrap: one way to make servers and channels, one mapping between errors and status codes.

Server: message limits, keepalive, no port sharing, an interceptor that maps domain errors to status codes, everything
else to INTERNAL without text. Client: the same limits, round-robin, no HTTP proxy, a deadline on every call, retries
of UNAVAILABLE only.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common.errors import BY_CODE, FlotillaError, InvalidArgument, ResourceExhausted, Unavailable
from services.common.logs import get_logger

MAX_MESSAGE_BYTES = 64 << 20
KEEPALIVE_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 20_000
RETRY_MIN_S = 0.05
RETRY_MAX_S = 2.0

_COMMON_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 3),
    ("grpc.http2.max_ping_strikes", 0),
]
CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    # Without it a peer that was away is tried again only after up to two minutes.
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
]

log = get_logger(__name__)
R = TypeVar("R")


def new_request_id() -> str:
    """An id for one intended call; a retry repeats it."""
    return uuid.uuid4().hex


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf Duration."""
    value = Duration()
    value.FromNanoseconds(round(seconds * 1e9))
    return value


def seconds(value: Duration) -> float:
    """A protobuf Duration in seconds."""
    return value.ToNanoseconds() / 1e9


# ---------------------------------------------------------------------------------------------------------- server


def to_status(error: FlotillaError) -> status_pb2.Status:
    """The gRPC status of a domain error, with the details that AIP-193 asks for."""
    status = status_pb2.Status(code=error.code.value[0], message=str(error))
    _add_detail(status, error_details_pb2.ErrorInfo(reason=error.code.name, domain="flotilla"))
    if isinstance(error, InvalidArgument) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        _add_detail(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhausted | Unavailable):
        _add_detail(status, error_details_pb2.RetryInfo(retry_delay=duration(error.retry_after_s)))
    return status


def _add_detail(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


MAX_MESSAGE = 2000
"""Characters of an error: it travels in headers, which have a limit."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps domain errors to their status; no call ever ends as UNKNOWN, and no text of a bug reaches a caller."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/flotilla."):
            return handler
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _guard_unary(handler.unary_unary, method), handler.request_deserializer, handler.response_serializer
            )
        assert handler.unary_stream, f"{method}: only unary requests are in use"
        return grpc.unary_stream_rpc_method_handler(
            _guard_stream(handler.unary_stream, method), handler.request_deserializer, handler.response_serializer
        )


def _guard_unary(behaviour: Any, method: str) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001  the one place where every error becomes a status
            await _abort(context, method, error)

    return guarded


def _guard_stream(behaviour: Any, method: str) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except Exception as error:  # noqa: BLE001  as above
            await _abort(context, method, error)

    return guarded


async def _abort(context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, FlotillaError):
        status = to_status(error)
        status.message = status.message[:MAX_MESSAGE]
    else:
        log.error("a call failed with a bug", method=method, exc_info=error)
        status = status_pb2.Status(code=code_pb2.INTERNAL, message=f"internal error in {method}; see the service's log")
    await context.abort_with_status(rpc_status.to_status(status))


def make_server() -> grpc.aio.Server:
    """A server with our options and interceptor; bind it with `bind_server`."""
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=[ErrorInterceptor()])


def bind_server(server: grpc.aio.Server, host: str, port: int) -> None:
    """Listen on host:port. Raises OSError that names the address if it is in use."""
    try:
        server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}: it is in use, or not an address of this host") from error


# ---------------------------------------------------------------------------------------------------------- client


def open_channel(target: str) -> grpc.aio.Channel:
    """A channel to host:port. Make it once, inside the event loop that uses it."""
    return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)


def from_rpc_error(error: grpc.aio.AioRpcError) -> FlotillaError:
    """The domain error behind a failed call."""
    message = error.details() or error.code().name
    if error.code() == grpc.StatusCode.CANCELLED:  # a server that stops cancels what it has queued
        return Unavailable(message)
    cls = BY_CODE.get(error.code(), FlotillaError)
    mapped = cls(message)
    status = rpc_status.from_call(cast(Any, error))
    for detail in status.details if status else ():
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and isinstance(mapped, ResourceExhausted | Unavailable):
            mapped.retry_after_s = seconds(info.retry_delay)
    return mapped


async def call(method: Callable[..., Awaitable[R]], request: Any, *, timeout_s: float, patience_s: float = 0.0) -> R:
    """Make one unary call.

    Args:
        method: A stub's method, as `stub.LeaseWork`.
        request: Its request; a retry sends it again unchanged, request_id included.
        timeout_s: Deadline of one attempt.
        patience_s: How long to go on trying while the peer is UNAVAILABLE or full.

    Raises:
        FlotillaError: What the service answered, or Unavailable or DeadlineExceeded.
    """
    give_up = time.monotonic() + patience_s
    pause = RETRY_MIN_S
    while True:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if not isinstance(error, Unavailable | ResourceExhausted) or time.monotonic() >= give_up:
                raise error from None
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, RETRY_MAX_S)
