"""The scripts of the ledger called by redis-py alone, and plain SETs: what Redis gives without a buffer before it.

The commands are made ahead of time, which works because ids, tokens and answers follow from what came before.
Each stage of the life of 64 groups travels in one pipeline, or over 64 connections at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from benchmarks.buffer_stack import BATCH, GROUP
from flotilla.buffer.v1 import buffer_pb2
from flotilla.common.v1 import common_pb2
from services.buffer.codec import finished_sample
from services.buffer.ledger import Ledger
from services.buffer.records import FinishedSample
from services.common.spec import RunSpec

BATCHES_A_ROUND = 2
VERDICTS = ["SCORED:CORRECT"] * GROUP
REWARDS = [1.0, 0.0] * (GROUP // 2)
SET_CONNECTIONS = 4
TOKEN_PREFIX = 8
"""Where a command that leases work says what its tokens begin with: ARGV[5]."""

Command = tuple[Any, ...]


class Scripts(Ledger):
    """Gives the commands of the ledger's calls instead of running them; every call is answered with 1."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._asked: Command = ()

    async def _run(self, script: str, *args: Any) -> Any:
        self._asked = ("EVALSHA", self._scripts[script].sha, 1, self.prefix, *args)
        return [] if script == "lease_work" else [1, 1, b""] if script == "lease_batch" else 1

    def command(self, call: Coroutine[Any, Any, Any]) -> Command:
        """The command of one call."""
        try:
            call.send(None)
        except StopIteration:
            return self._asked
        raise AssertionError("the call waits for more than its script")

    def load(self, redis: Redis) -> None:
        """Make the scripts known to Redis."""
        for script in self._scripts.values():
            redis.script_load(script.script)


def make_finished(samples: list[common_pb2.Sample]) -> list[FinishedSample]:
    """The samples as the buffer would store them."""
    return [finished_sample(one, "", GROUP, []) for one in samples]


class RawRun:
    """A run that nobody serves, from its first epoch on."""

    def __init__(self, spec: RunSpec) -> None:
        self.redis = Redis(port=spec.redis.port)
        self._scripts = Scripts(spec)
        self._scripts.load(self.redis)
        self._do(
            [
                self._scripts.command(self._scripts.register(spec.digest())),
                self._scripts.command(self._scripts.begin_epoch("first", 0, "", [])),
                self._scripts.command(self._scripts.record_version(1, 0, "LIVE", b"", {})),
            ]
        )
        self._batch = 0
        self._manifest = _manifest()

    def _do(self, commands: list[Command]) -> list[Any]:
        pipe = self.redis.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return pipe.execute()

    def stages(self, samples: list[FinishedSample], batches: int, groups_a_lease: int) -> Iterator[list[Command]]:
        """The whole life of some batches of groups, from the lease to the commit."""
        scripts, command = self._scripts, self._scripts.command
        first, count = self._batch * BATCH, batches * BATCH
        leases = [
            command(scripts.lease_work(f"r{first + at}", "raw", groups_a_lease))
            for at in range(0, count, groups_a_lease)
        ]
        # One prefix for all, so that the order does not matter in which they arrive.
        yield [(*one[:TOKEN_PREFIX], "raw", *one[TOKEN_PREFIX + 1 :]) for one in leases]
        ids = [f"g{first + at:08d}" for at in range(count)]
        yield [command(scripts.submit(gid, f"raw:{gid}", GROUP, samples)) for gid in ids]
        yield [command(scripts.score(gid, REWARDS, VERDICTS)) for gid in ids]
        yield [command(scripts.settle(gid, True, "", REWARDS)) for gid in ids]
        for batch in range(self._batch, self._batch + batches):
            own = ids[(batch - self._batch) * BATCH :][:BATCH]
            yield [command(scripts.seal(batch, f"d{batch}", self._manifest, own))]
            yield [command(scripts.lease_batch(1))]
            yield [command(scripts.ack_batch(1, batch, f"d{batch}"))]
            yield [command(scripts.record_version(1, batch + 1, "LIVE", b"", {}))]
            yield [command(scripts.commit(1, batch + 1, "none"))]
        self._batch += batches

    def pipelined(self, samples: list[FinishedSample], seconds: float) -> float:
        """Samples per second through all stages, each stage a pipeline."""
        return self._samples_per_s(samples, seconds, self._do)

    def connected(self, samples: list[FinishedSample], seconds: float) -> float:
        """Samples per second through all stages, each command of a stage on a connection of its own."""
        port = self.redis.connection_pool.connection_kwargs["port"]
        many: Any = AsyncRedis(port=port, max_connections=BATCHES_A_ROUND * BATCH)

        async def at_once(commands: list[Command]) -> None:
            await asyncio.gather(*(many.execute_command(*command) for command in commands))

        with asyncio.Runner() as runner:
            found = self._samples_per_s(samples, seconds, lambda commands: runner.run(at_once(commands)))
            runner.run(many.aclose())
        return found

    def _samples_per_s(
        self, samples: list[FinishedSample], seconds: float, do: Callable[[list[Command]], object]
    ) -> float:
        """What it takes to make the commands is left out."""
        spent = done = 0.0
        while spent < seconds:
            for commands in list(self.stages(samples, BATCHES_A_ROUND, 1)):
                begun = time.monotonic()
                do(commands)
                spent += time.monotonic() - begun
            done += BATCHES_A_ROUND * BATCH * GROUP
        return done / spent

    def fill(self, samples: list[FinishedSample], groups: int) -> None:
        """Groups that were trained and committed."""
        for _ in range(groups // BATCH):
            self._do([command for commands in self.stages(samples, 1, BATCH) for command in commands])


def _manifest() -> bytes:
    """A manifest as large as that of a batch."""
    row = buffer_pb2.BatchRow(
        group_id="g00000000", prompt_tokens=64, response_tokens=1024, reward=1, advantage=1, loss_denominator=1024
    )
    return buffer_pb2.BatchManifest(digest="0" * 64, rows=[row] * BATCH * GROUP).SerializeToString()


def set_bytes_per_s(port: int, payloads: list[bytes], seconds: float) -> float:
    """Bytes that Redis takes by SET, a group in a pipeline, over some connections."""

    def write(connection: int) -> int:
        redis, sent = Redis(port=port), 0
        while time.monotonic() < until:
            pipe = redis.pipeline(transaction=False)
            for at, payload in enumerate(payloads):
                pipe.set(f"raw:{connection}:{at}", payload)
            pipe.execute()
            sent += sum(map(len, payloads))
        return sent

    begun = time.monotonic()
    until = begun + seconds
    with ThreadPoolExecutor(SET_CONNECTIONS) as pool:
        sent = sum(pool.map(write, range(SET_CONNECTIONS)))
    return sent / (time.monotonic() - begun)
