"""Errors across the wire, retries, ports, health, reflection and graceful stop, over a real server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla.reward.v1 import reward_pb2, reward_pb2_grpc
from services.common.errors import (
    BY_CODE,
    FailedPrecondition,
    FlotillaError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from services.common.rpc import bind_server, call, make_server, open_channel
from services.common.service import ServiceHost, serve
from services.common.spec import Endpoint, RunSpec
from tests.conftest import free_ports


class Scripted(reward_pb2_grpc.RewardServiceServicer):
    """Raises what it is told to; counts calls."""

    stub: reward_pb2_grpc.RewardServiceAsyncStub

    def __init__(self) -> None:
        self.raises: list[Exception] = []
        self.calls = 0

    async def Grade(self, request, context):
        self.calls += 1
        if self.raises:
            raise self.raises.pop(0)
        return reward_pb2.GradeResponse()

    async def ListGraders(self, request, context):
        return reward_pb2.ListGradersResponse()


@pytest.fixture
async def scripted():
    servicer, server, port = Scripted(), make_server(), free_ports(1)[0]
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)
    bind_server(server, "127.0.0.1", port)
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    servicer.stub = reward_pb2_grpc.RewardServiceStub(channel)
    yield servicer
    await channel.close()
    await server.stop(0)


@pytest.mark.parametrize("kind", BY_CODE.values())
async def test_every_domain_error_comes_back_as_itself(scripted, kind):
    scripted.raises = [kind("what went wrong")]
    with pytest.raises(kind, match="what went wrong"):
        await call(scripted.stub.Grade, reward_pb2.GradeRequest(), timeout_s=5)


async def test_a_bug_is_internal_and_says_nothing(scripted):
    scripted.raises = [KeyError("secret")]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scripted.stub.Grade(reward_pb2.GradeRequest(), timeout=5)
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (caught.value.details() or "")


async def test_unavailable_and_full_are_retried_within_patience(scripted):
    scripted.raises = [Unavailable("away"), ResourceExhausted("full")]
    await call(scripted.stub.Grade, reward_pb2.GradeRequest(), timeout_s=5, patience_s=10)
    assert scripted.calls == 3


async def test_other_errors_are_not_retried(scripted):
    scripted.raises = [FailedPrecondition("no")]
    with pytest.raises(FailedPrecondition):
        await call(scripted.stub.Grade, reward_pb2.GradeRequest(), timeout_s=5, patience_s=10)
    assert scripted.calls == 1


async def test_retry_info_travels(scripted):
    scripted.raises = [ResourceExhausted("full", retry_after_s=2.5)]
    with pytest.raises(ResourceExhausted) as caught:
        await call(scripted.stub.Grade, reward_pb2.GradeRequest(), timeout_s=5)
    assert caught.value.retry_after_s == 2.5


async def test_bad_request_names_the_field_on_the_wire(scripted):
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    scripted.raises = [InvalidArgument("too long", "items")]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scripted.stub.Grade(reward_pb2.GradeRequest(), timeout=5)
    details = error_details_pb2.BadRequest()
    status = rpc_status.from_call(cast(Any, caught.value))
    assert status is not None
    assert any(detail.Unpack(details) for detail in status.details)
    assert details.field_violations[0].field == "items"


async def test_a_peer_that_is_away_is_unavailable():
    channel = open_channel(f"127.0.0.1:{free_ports(1)[0]}")
    stub = reward_pb2_grpc.RewardServiceStub(channel)
    with pytest.raises(Unavailable):
        await call(stub.Grade, reward_pb2.GradeRequest(), timeout_s=5)
    await channel.close()


async def test_messages_over_the_default_limit_pass(scripted):
    items = [reward_pb2.GradeItem(response="x" * (6 << 20))]
    await call(scripted.stub.Grade, reward_pb2.GradeRequest(items=items), timeout_s=10)


async def test_two_servers_cannot_share_a_port():
    port = free_ports(1)[0]
    first, second = make_server(), make_server()
    bind_server(first, "127.0.0.1", port)
    with pytest.raises(OSError, match=str(port)):
        bind_server(second, "127.0.0.1", port)


def fetch(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def run_service_around(body) -> BaseException | None:
    """Serve a scripted service, run `body(host)`, stop."""
    ports = free_ports(2)
    endpoint = Endpoint(grpc_port=ports[0], http_port=ports[1])
    spec = RunSpec.model_construct(run_id="r")

    async def setup(host: ServiceHost) -> None:
        adder = reward_pb2_grpc.add_RewardServiceServicer_to_server
        host.serve("flotilla.reward.v1.RewardService", adder, Scripted())

        async def run() -> None:
            channel = open_channel(host.endpoint.grpc)
            await asyncio.wait_for(channel.channel_ready(), 10)
            await channel.close()
            await body(host)
            host.stopping.set()

        host.spawn(run(), "body")

    return await serve("reward", spec, setup, endpoint)


async def test_endpoints_health_and_reflection():
    seen = {}

    async def body(host: ServiceHost) -> None:
        for path in ("/livez", "/readyz", "/metrics", "/statusz"):
            seen[path] = await asyncio.to_thread(fetch, host.endpoint.http, path)
        host.board.checks["redis"] = lambda: "away"
        seen["unready"] = await asyncio.to_thread(fetch, host.endpoint.http, "/readyz")
        channel = open_channel(host.endpoint.grpc)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        seen["health"] = (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status
        await channel.close()
        grpcurl = Path(sys.executable).parent / "grpcurl"
        command = [grpcurl, "-plaintext", host.endpoint.grpc, "list"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        seen["list"] = done.stdout

    assert await run_service_around(body) is None
    assert seen["/livez"][0] == seen["/readyz"][0] == 200
    assert "process_cpu_seconds_total" in seen["/metrics"][1]
    assert json.loads(seen["/statusz"][1])["service"] == "reward"
    assert seen["unready"][0] == 503 and "away" in seen["unready"][1]
    assert seen["health"] == health_pb2.HealthCheckResponse.SERVING
    assert "flotilla.reward.v1.RewardService" in seen["list"]


async def test_a_background_task_that_fails_ends_the_process():
    class Broken(FlotillaError):
        """What the task raises."""

    async def body(host: ServiceHost) -> None:
        async def fail() -> None:
            raise Broken("on purpose")

        host.spawn(fail(), "fail")
        await host.stopping.wait()

    assert isinstance(await run_service_around(body), Broken)
