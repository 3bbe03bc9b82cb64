"""What the processes of a run say about themselves, from their endpoints: /statusz, PING and the ledger's counts."""

from __future__ import annotations

import asyncio
import http.client
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.cli.processes import Process
from services.common.errors import FlotillaError
from services.common.rpc import call, open_channel
from services.common.spec import RunSpec

ANSWER_TIMEOUT_S = 1.5
"""A healthy process answers in milliseconds; one that computes may be late."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one process says."""

    ready: bool
    starting: bool
    problems: tuple[str, ...]
    """In words, those of the start left out."""
    waits: tuple[tuple[str, float], ...]
    """What it waits for, and since when (Unix time in seconds), longest first."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of the buffer and facts of the registry."""

    issued: int
    groups: dict[str, int]
    """Groups by state, as `kept`; those without any are left out."""
    conserved: bool
    live_step: int | None
    committed_step: int
    run_epoch: int
    stopped: bool
    """The run's desired state is STOPPED."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a run."""

    answers: dict[str, Answer | None]
    """By process; None for one that does not answer."""
    ledger: Ledger | None


class Observer:
    """Looks at a run through its endpoints. Open it inside the event loop that uses it."""

    def __init__(self, spec: RunSpec, processes: list[Process]) -> None:
        self._spec = spec
        self._processes = processes

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._spec.services.buffer.grpc)
        self._buffer = buffer_pb2_grpc.BufferServiceStub(self._channel)
        self._registry = registry_pb2_grpc.RunRegistryServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def look(self) -> Observation:
        """Ask everyone at once; who does not answer in time counts as silent."""
        everyone = asyncio.gather(*(self._ask(one) for one in self._processes))
        ledger, answers = await asyncio.gather(self._ask_ledger(), everyone)
        names = [one.name for one in self._processes]
        return Observation(dict(zip(names, answers, strict=True)), ledger)

    async def _ask(self, process: Process) -> Answer | None:
        if process.endpoint is None:
            return await ping_redis(self._spec.redis.host, self._spec.redis.port)
        return await asyncio.to_thread(fetch_status, process.endpoint.host, process.endpoint.http_port)

    async def _ask_ledger(self) -> Ledger | None:
        run_id = self._spec.run_id
        try:
            stats, answer = await asyncio.gather(
                call(
                    self._buffer.GetBufferStats,
                    buffer_pb2.GetBufferStatsRequest(run_id=run_id),
                    timeout_s=ANSWER_TIMEOUT_S,
                ),
                call(self._registry.GetRun, registry_pb2.GetRunRequest(run_id=run_id), timeout_s=ANSWER_TIMEOUT_S),
            )
        except FlotillaError:
            return None
        return to_ledger(stats, answer.run)


def to_ledger(stats: buffer_pb2.GetBufferStatsResponse, run: registry_pb2.Run) -> Ledger:
    """The answers of the buffer, without protobuf."""
    name_of = buffer_pb2.GroupState.Name
    groups = {name_of(one.state).removeprefix("GROUP_STATE_").lower(): one.count for one in stats.groups if one.count}
    return Ledger(
        issued=stats.issued,
        groups=groups,
        conserved=stats.conserved,
        live_step=run.live_version.step if run.HasField("live_version") else None,
        committed_step=run.committed_step,
        run_epoch=run.run_epoch,
        stopped=run.desired_state == registry_pb2.DESIRED_STATE_STOPPED,
    )


def fetch_status(host: str, port: int) -> Answer | None:
    """What /statusz answers; None if nothing does. Blocks at most ANSWER_TIMEOUT_S for each read."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/statusz")
        return to_answer(json.loads(connection.getresponse().read()))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def to_answer(status: dict[str, Any]) -> Answer:
    """The part of a /statusz that every service has."""
    problems = dict(status.get("problems", {}))
    starting = bool(problems.pop("started", ""))
    waits = sorted(((one["what"], one["since"]) for one in status.get("waiting_for", [])), key=lambda wait: wait[1])
    return Answer(status.get("ready", False), starting, tuple(problems.values()), tuple(waits))


async def ping_redis(host: str, port: int) -> Answer | None:
    """Whether Redis serves; one that loads its file does not yet."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"PING\r\n")
                reply = (await reader.readline()).decode().strip()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    ready, loading = reply == "+PONG", reply.startswith("-LOADING")
    return Answer(ready, loading, () if ready or loading else (reply,), ())
