"""The buffer while Redis is away, silent or full, and as a user of an ACL: the real buffer over a real Redis.

The reward service is scripted, as in `buffer_harness`.
"""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis as redis_py
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import registry_pb2 as registry_pb
from services.common.http import HttpServer
from services.common.spec import RunSpec
from tests.buffer_harness import RUN_ID, Buffer, make_spec
from tests.redis_server import RedisServer

UNREADY_WITHIN_S = 10.0
READY_WITHIN_S = 30.0
CALL_S = 20.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "redis").mkdir()
    one = RedisServer(tmp_path / "redis", "64mb")
    yield one
    one.process.send_signal(signal.SIGCONT)
    one.stop()


@asynccontextmanager
async def serving(spec: RunSpec) -> AsyncIterator[Buffer]:
    """A buffer with its HTTP side."""
    buffer = await Buffer(spec).start()
    http = HttpServer(buffer.host.board, spec.services.buffer)
    task = asyncio.create_task(http.serve_bound())
    try:
        await until_ready(spec, True, READY_WITHIN_S)
        yield buffer
    finally:
        http.should_exit = True
        await task
        await buffer.stop()


async def until_ready(spec: RunSpec, wanted: bool, deadline_s: float) -> None:
    """Wait until /readyz says 200, or 503."""
    give_up = time.monotonic() + deadline_s
    while await asyncio.to_thread(readyz, spec.services.buffer.http) != (200 if wanted else 503):
        assert time.monotonic() < give_up, f"/readyz has not changed in {deadline_s} s"
        await asyncio.sleep(0.1)


def readyz(address: str) -> int:
    try:
        return urllib.request.urlopen(f"http://{address}/readyz", timeout=2).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:  # not yet listening
        return 0


async def assert_unavailable(call: Any) -> None:
    """The call ends UNAVAILABLE and says when to try again."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    info, status = error_details_pb2.RetryInfo(), rpc_status.from_call(caught.value)  # pyright: ignore[reportArgumentType]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value
    assert status and any(detail.Unpack(info) for detail in status.details), caught.value
    assert 0 < info.retry_delay.ToNanoseconds() <= 5e9


async def renew(buffer: Buffer, lease: Any) -> Any:
    request = pb.RenewLeaseRequest(
        run_id=RUN_ID, request_id=uuid.uuid4().hex, group_id=lease.group_id, lease_token=lease.lease_token
    )
    return await buffer.stub.RenewLease(request, timeout=CALL_S)


def get_run(buffer: Buffer) -> Any:
    return buffer.registry.GetRun(registry_pb.GetRunRequest(run_id=RUN_ID), timeout=CALL_S)


def list_groups(buffer: Buffer) -> Any:
    return buffer.stub.ListGroups(pb.ListGroupsRequest(run_id=RUN_ID), timeout=CALL_S)


async def test_while_redis_is_away_nothing_is_answered_and_then_all_goes_on(tmp_path, server):
    spec = make_spec(tmp_path, server.port, rollout_batch_size=4)
    async with serving(spec) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        for evaluated in await buffer.lease():
            await buffer.submit(evaluated)
        work = await buffer.lease()
        for away, back in (
            (server.kill, server.start),
            (lambda: server.process.send_signal(signal.SIGSTOP), lambda: server.process.send_signal(signal.SIGCONT)),
        ):
            first, *work = work
            await buffer.submit(first)
            before = await buffer.stats()
            away()
            await asyncio.gather(
                until_ready(spec, False, UNREADY_WITHIN_S),
                assert_unavailable(buffer.lease()),
                assert_unavailable(buffer.submit(work[-1])),  # it may have had an effect, and is repeated below
                assert_unavailable(renew(buffer, work[0])),
                assert_unavailable(buffer.lease_batch(epoch, wait_s=0)),
                assert_unavailable(buffer.stats()),
                assert_unavailable(list_groups(buffer)),
                assert_unavailable(get_run(buffer)),
            )
            back()
            await until_ready(spec, True, READY_WITHIN_S)
            assert (await buffer.stats()).issued == before.issued
            await buffer.submit(first)  # what was acknowledged is there: the first answer again
            await renew(buffer, work[0])
        for lease in work:
            await buffer.submit(lease)
        assert (await buffer.lease_batch(epoch)).manifest.batch == 0


def set_limit(port: int, maxmemory: str) -> None:
    """Change maxmemory of the running Redis."""
    with redis_py.Redis(port=port) as redis:
        redis.config_set("maxmemory", maxmemory)


def kept_payloads(port: int) -> int:
    """How many training samples Redis holds."""
    with redis_py.Redis(port=port) as redis:
        return sum(1 for _ in redis.scan_iter("*:payload:g*", count=1000))


async def test_full_redis_takes_no_samples_but_all_that_ends_in_room(tmp_path, server):
    async with serving(make_spec(tmp_path, server.port)) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await buffer.fill_batch(epoch)
        manifest = (await buffer.lease_batch(epoch)).manifest
        await buffer.go_live(epoch, 1)
        first, second = await buffer.lease()
        set_limit(server.port, "500kb")  # less than it takes for itself

        await assert_unavailable(buffer.submit(first))
        await renew(buffer, first)
        await buffer.ack(epoch, manifest)
        await buffer.commit(epoch, 1)
        release = pb.ReleaseLeaseRequest(
            run_id=RUN_ID, request_id=uuid.uuid4().hex, group_id=second.group_id, lease_token=second.lease_token
        )
        await buffer.stub.ReleaseLease(release, timeout=CALL_S)
        assert await buffer.begin_epoch(step=1, digests=(manifest.digest,)) == epoch + 1
        assert await buffer.counts() == {"COMMITTED": 2, "GENERATING": 1, "WAITING": 1}
        give_up = time.monotonic() + CALL_S
        while kept_payloads(server.port):  # memory is short: what is committed lets go of its tokens at once
            assert time.monotonic() < give_up, "payloads of committed groups are still there"
            await asyncio.sleep(0.1)
        set_limit(server.port, "64mb")
        await buffer.submit(first)


async def test_on_a_full_redis_the_buffer_starts_and_what_was_issued_is_handed_out(tmp_path, server):
    spec = make_spec(tmp_path, server.port, lease_ttl_s=1.0)
    async with serving(spec) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        for evaluated in await buffer.lease():
            await buffer.submit(evaluated)
        assert len(await buffer.lease()) == 2
        await buffer.go_live(epoch, 2)
    set_limit(server.port, "500kb")
    async with serving(spec) as buffer:
        await buffer.until(WAITING=2)  # the leases lapsed
        assert [lease.group_id[0] for lease in await buffer.lease()] == ["e", "e"]


async def test_a_batch_as_a_user_with_what_the_documentation_grants(tmp_path, server):
    password_file = tmp_path / "password"
    password_file.write_text("secret\n")
    with redis_py.Redis(port=server.port) as admin:
        rules = ("on", ">secret", "~flotilla:*", "+@all", "-@dangerous", "+config|get", "+info")
        admin.execute_command("ACL", "SETUSER", "flotilla", *rules)
        admin.execute_command("ACL", "SETUSER", "default", "off")
    spec = make_spec(tmp_path, server.port)
    redis = spec.redis.model_copy(update={"username": "flotilla", "password_file": password_file})
    async with serving(spec.model_copy(update={"redis": redis})) as buffer:
        epoch = await buffer.begin_epoch()
        await buffer.go_live(epoch, 0)
        await buffer.fill_batch(epoch)
        manifest = (await buffer.lease_batch(epoch)).manifest
        await buffer.ack(epoch, manifest)
        await buffer.commit(epoch, 1)
        assert (await buffer.counts())["COMMITTED"] == 2
        await list_groups(buffer)
