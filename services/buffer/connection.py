"""The connections to Redis, and what must be true of a Redis before a ledger is kept in it.

A call that is cancelled takes its connection with it: its reply can never be read as the answer to another call
(CVE-2023-28858). A connection that breaks is made again a few times within a call, then the call fails.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import EqualJitterBackoff

from services.buffer.errors import redis_errors
from services.common.errors import FailedPrecondition
from services.common.spec import RedisSpec, SpecError

SOCKET_TIMEOUT_S = 5.0
POOL_SIZE = 32
READ_BYTES = 1 << 20
"""Payloads come in large pieces; with the default of 64 KiB every MB takes 16 turns of the event loop."""
RETRIES = 3
"""Of a call whose connection broke. One that gets no answer is not repeated: its caller has a deadline."""
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 0.5
REQUIRED_REDIS = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""What a ledger needs: with less, an acknowledged write can be lost (`everysec` loses some on a kill of Redis)."""


def open_redis(spec: RedisSpec) -> Any:
    """A client whose connections are made when they are needed; replies are bytes.

    The type is Any because redis-py declares every command as both blocking and awaitable, which no type checker can
    follow.

    Raises:
        SpecError: The file with the password or the certificates cannot be used.
    """
    pool = BlockingConnectionPool(
        connection_class=SSLConnection if spec.tls else Connection,
        host=spec.host,
        port=spec.port,
        username=spec.username or None,
        password=_password(spec.password_file),
        max_connections=POOL_SIZE,
        socket_read_size=READ_BYTES,
        timeout=SOCKET_TIMEOUT_S,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
        # Every script may be repeated: it checks state, token or request_id before it changes anything.
        retry=Retry(EqualJitterBackoff(RETRY_MOST_S, RETRY_FIRST_S), RETRIES, (exceptions.ConnectionError,)),
        **(_trust(spec.tls_ca_file) if spec.tls else {}),
    )
    return Redis(connection_pool=pool)


def _password(file: Path) -> str | None:
    if file == Path():
        return None
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"redis.password_file: cannot read {file}: {error}; correct the path or the file") from None
    if not password:
        raise SpecError(f"redis.password_file: {file} is empty; write the password into it")
    return password


def _trust(certificates: Path) -> dict[str, Any]:
    if certificates == Path():
        return {}
    try:
        ssl.create_default_context(cafile=certificates)
    except OSError as error:
        raise SpecError(
            f"redis.tls_ca_file: {certificates} has no PEM certificates that can be read: {error}"
        ) from None
    return {"ssl_ca_certs": str(certificates)}


async def check_durability(redis: Any, spec: RedisSpec) -> int:
    """Make sure that Redis keeps every acknowledged write; returns its memory limit in bytes, 0 if it has none.

    Raises:
        FailedPrecondition: It would lose writes, refuses the credentials or the question, or cannot be trusted.
        Unavailable: It is away.
    """
    where = f"redis at {spec.host}:{spec.port}"
    with redis_errors():
        try:
            settings: dict[str, str] = {}
            for name in ("maxmemory", *REQUIRED_REDIS):
                settings |= await redis.config_get(name)
        except exceptions.AuthenticationError as error:
            raise FailedPrecondition(
                f"{where} refuses the credentials ({error}); correct redis.username and redis.password_file"
            ) from error
        except exceptions.ResponseError as error:
            raise FailedPrecondition(
                f"{where} does not let user {spec.username or 'default'!r} read its settings ({error}); "
                "the buffer's user needs +config|get +info"
            ) from error
        except exceptions.ConnectionError as error:
            if isinstance(error.__context__, ssl.SSLCertVerificationError):
                raise FailedPrecondition(
                    f"{where}: its certificate is not to be trusted ({error}); correct redis.host or redis.tls_ca_file"
                ) from error
            raise
    for name, wanted in REQUIRED_REDIS.items():
        if settings.get(name) != wanted:
            raise FailedPrecondition(
                f"{where}: {name} is {settings.get(name)!r}; set it to {wanted!r}, or writes can be lost"
            )
    return int(settings["maxmemory"])


async def memory_use(redis: Any) -> tuple[int, int]:
    """(used, limit): bytes that count towards Redis's memory limit now, and that limit; 0 if it has none."""
    with redis_errors():
        found = await redis.info("memory")
    return found["used_memory"] - found["mem_not_counted_for_evict"], found["maxmemory"]
