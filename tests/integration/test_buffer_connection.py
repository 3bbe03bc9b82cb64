"""The buffer's connections to Redis: cancelled calls, credentials, TLS, and what a Redis must be.

Everything is real; a TCP proxy stands before Redis where its replies must come late.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.buffer.connection import POOL_SIZE, check_durability, memory_use, open_redis
from services.common.errors import FailedPrecondition, Unavailable
from services.common.spec import RedisSpec, SpecError
from tests.conftest import free_ports
from tests.redis_server import RedisServer, redis_binary

MAXMEMORY_MB = 100


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    one = RedisServer(tmp_path, f"{MAXMEMORY_MB}mb")
    yield one
    one.stop()


@asynccontextmanager
async def client(spec: RedisSpec) -> AsyncIterator[Any]:
    redis = open_redis(spec)
    try:
        yield redis
    finally:
        await redis.aclose(close_connection_pool=True)


@asynccontextmanager
async def late_replies(port: int, delay_s: float) -> AsyncIterator[int]:
    """Port of a proxy that hands on every reply after a while."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.sleep(delay_s)
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, to_writer, 0), pump(to_reader, writer, delay_s), return_exceptions=True)

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with proxy:
        yield proxy.sockets[0].getsockname()[1]


async def single(redis, text: str) -> list[bytes]:
    return [await redis.echo(text)]


async def pipelined(redis, text: str) -> list[bytes]:
    async with redis.pipeline(transaction=False) as pipe:
        return await pipe.echo(text).echo(f"{text} again").execute()


async def scripted(redis, text: str) -> list[bytes]:
    return await redis.register_script("return {ARGV[1], ARGV[1] .. ' again'}")(args=[text])


# ---------------------------------------------------------------------------------------------------- cancelled calls


@pytest.mark.parametrize("call", [single, pipelined, scripted])
async def test_reply_to_a_cancelled_call_answers_no_other(server, call):
    async with late_replies(server.port, 0.02) as port, client(RedisSpec(port=port)) as redis:
        await asyncio.gather(*(call(redis, f"first {i}") for i in range(POOL_SIZE)))  # every connection is open
        for cut_after_s in (0.0, 0.005, 0.01, 0.015, 0.02, 0.025):
            doomed = [asyncio.create_task(call(redis, f"doomed {i}")) for i in range(2 * POOL_SIZE)]
            await asyncio.sleep(cut_after_s)
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
            for i, answer in enumerate(await asyncio.gather(*(call(redis, f"{i}") for i in range(2 * POOL_SIZE)))):
                assert answer == [f"{i}".encode(), f"{i} again".encode()][: len(answer)]


# -------------------------------------------------------------------------------------------- what a Redis must be


async def test_memory_and_its_limit(server):
    async with client(RedisSpec(port=server.port)) as redis:
        assert await check_durability(redis, RedisSpec(port=server.port)) == MAXMEMORY_MB << 20
        before, limit = await memory_use(redis)
        for i in range(64):
            await redis.set(f"payload:{i}", bytes(64 << 10))
        after, _ = await memory_use(redis)
    assert limit == MAXMEMORY_MB << 20 and 4 << 20 <= after - before < 6 << 20


@pytest.mark.parametrize(
    ("name", "value"), [("appendonly", "no"), ("appendfsync", "everysec"), ("maxmemory-policy", "allkeys-lru")]
)
async def test_a_redis_that_may_lose_writes_is_refused(server, name, value):
    spec = RedisSpec(port=server.port)
    async with client(spec) as redis:
        await redis.config_set(name, value)
        with pytest.raises(FailedPrecondition, match=f"127.0.0.1:{server.port}: {name} is '{value}'; set it to"):
            await check_durability(redis, spec)


async def test_a_redis_that_is_away_is_unavailable():
    spec = RedisSpec(port=free_ports(1)[0])
    async with client(spec) as redis:
        with pytest.raises(Unavailable, match="Redis is away"):
            await check_durability(redis, spec)


# ------------------------------------------------------------------------------------------------------- credentials


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("secret\n")
    return path


async def allow(server: RedisServer, *rules: str) -> None:
    """Make the user `flotilla` with the password `secret`, and let nobody else in."""
    async with client(RedisSpec(port=server.port)) as redis:
        await redis.execute_command("ACL", "SETUSER", "flotilla", "on", ">secret", "~flotilla:*", *rules)
        await redis.execute_command("ACL", "SETUSER", "default", "off")


async def test_user_with_what_the_documentation_grants(server, password_file):
    await allow(server, "+@all", "-@dangerous", "+config|get", "+info")
    spec = RedisSpec(port=server.port, username="flotilla", password_file=password_file)
    async with client(spec) as redis:
        await check_durability(redis, spec)
        await memory_use(redis)
        await redis.set("flotilla:{run}:run", "1")


async def test_user_who_may_not_read_the_settings(server, password_file):
    await allow(server, "+@all", "-@dangerous")
    spec = RedisSpec(port=server.port, username="flotilla", password_file=password_file)
    async with client(spec) as redis:
        with pytest.raises(FailedPrecondition, match=r"'flotilla' read its settings .*needs \+config\|get \+info"):
            await check_durability(redis, spec)


@pytest.mark.parametrize("given", ["wrong", None])
async def test_wrong_credentials(server, password_file, given):
    await allow(server, "+@all")
    password_file.write_text(given or "")
    file = password_file if given else Path()
    spec = RedisSpec(port=server.port, username="flotilla" if given else "", password_file=file)
    async with client(spec) as redis:
        with pytest.raises(FailedPrecondition, match=r"refuses the credentials .*redis\.password_file"):
            await check_durability(redis, spec)


@pytest.mark.parametrize("field", ["password_file", "tls_ca_file"])
@pytest.mark.parametrize("content", [None, ""])
async def test_files_that_cannot_be_used_are_named(tmp_path, field, content):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SpecError, match=rf"redis\.{field}: .*{path}"):
        open_redis(RedisSpec.model_validate({"tls": True, field: path}))


# --------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[RedisSpec]:
    """A Redis with TLS, whose certificate signs itself."""
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl to make certificates with")
    tried = subprocess.run([redis_binary(), "--port", "0", "--tls-port", "0"], capture_output=True, timeout=20)
    if b"Bad directive" in tried.stdout + tried.stderr:
        pytest.skip("this redis-server is built without TLS; name another one in FLOTILLA_TEST_REDIS")
    port, certificate, key = free_ports(1)[0], tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-out", certificate, "-keyout", key],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    arguments = ("--tls-port", str(port), "--tls-auth-clients", "no", "--tls-cert-file", str(certificate))
    one = RedisServer(tmp_path, more=(*arguments, "--tls-key-file", str(key)))
    yield RedisSpec(host="localhost", port=port, tls=True, tls_ca_file=certificate)
    one.stop()


async def test_tls(tls):
    async with client(tls) as redis:
        assert await check_durability(redis, tls)
        assert await redis.echo("over TLS") == b"over TLS"


@pytest.mark.parametrize("change", [{"tls_ca_file": Path()}, {"host": "127.0.0.1"}])
async def test_certificate_that_is_not_to_be_trusted(tls, change):
    spec = tls.model_copy(update=change)
    async with client(spec) as redis:
        with pytest.raises(FailedPrecondition, match=r"certificate is not to be trusted .*redis\.tls_ca_file"):
            await check_durability(redis, spec)


async def test_plain_text_to_a_tls_port_is_unavailable(tls):
    spec = tls.model_copy(update={"tls": False})
    async with client(spec) as redis:
        with pytest.raises(Unavailable):
            await check_durability(redis, spec)
