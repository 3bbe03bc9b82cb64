"""The ledger of one run in Redis: every change is one Lua script, so it happens whole or not at all.

Invariant: issued = the sum of the groups in all states, at every instant. A crash of this process between two calls
leaves the ledger in a state from which the loops of `work.py` go on.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from services.buffer.errors import redis_errors
from services.buffer.states import State
from services.common.errors import FailedPrecondition, NotFound
from services.common.spec import RunSpec

SCRIPTS = Path(__file__).parent / "lua"
PARTS = ("prelude", "commit_batches")
"""Files of shared functions that stand before every script."""
KEEP_PAYLOAD_S = 3600
"""How long tokens of dropped and committed groups stay readable."""
SOCKET_TIMEOUT_S = 10.0
POOL_SIZE = 32
RETRIES = 3
REQUIRED_REDIS = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""What a ledger needs: with less, an acknowledged write can be lost (`everysec` loses some on a kill of Redis)."""

MAX_STALENESS = 0
"""How far ahead of the live version work may start; the scripts take any value, the run spec offers none yet."""

Fields = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class SampleHeader:
    """What the ledger knows about a finished sample without its tokens."""

    prompt_tokens: int
    response_tokens: int
    loss_tokens: int
    """Sum of the loss mask."""
    finish_reason: int
    oldest_step: int
    """Oldest policy step in its spans."""
    versions: list[str]
    """Policy versions in its spans, as `epoch:step`."""

    @staticmethod
    def parse(text: bytes) -> SampleHeader:
        """From the JSON in the ledger."""
        return SampleHeader(*json.loads(text))

    def dump(self) -> str:
        """To JSON."""
        return json.dumps([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A sample on its way into the ledger."""

    index: int
    header: SampleHeader
    payload: bytes

    @property
    def content_hash(self) -> str:
        """SHA-256 of the payload, in hexadecimal."""
        return hashlib.sha256(self.payload).hexdigest()


@dataclass(frozen=True, slots=True)
class Group:
    """A group as the ledger has it."""

    group_id: str
    fields: Fields

    @property
    def state(self) -> State:
        """Where it is."""
        return State(self.text("state"))

    @property
    def is_evaluation(self) -> bool:
        """True for a group that measures a version."""
        return self.group_id.startswith("e")

    def number(self, name: str, default: int = 0) -> int:
        """An integer field."""
        return int(self.fields.get(name.encode(), default))

    def text(self, name: str) -> str:
        """A text field; '' if unset."""
        return self.fields.get(name.encode(), b"").decode()

    def headers(self) -> dict[int, SampleHeader]:
        """Headers of the finished samples, by index."""
        found = {int(k[2:]): SampleHeader.parse(v) for k, v in self.fields.items() if k.startswith(b"h:")}
        return dict(sorted(found.items()))

    def content_hash(self, index: int) -> str:
        """Hash of a finished sample's payload."""
        return self.text(f"hash:{index}")

    def rewards(self) -> list[float]:
        """Rewards by sample; empty before grading."""
        return json.loads(self.text("rewards") or "[]")

    def verdicts(self) -> list[str]:
        """Verdict and reason by sample; empty before grading."""
        return json.loads(self.text("verdicts") or "[]")


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one instant."""

    run: dict[str, str]
    train: dict[State, int]
    evaluation: dict[State, int]
    dropped: dict[str, int]
    failed: dict[str, int]

    def number(self, name: str, default: int = 0) -> int:
        """An integer fact of the run."""
        return int(self.run.get(name, default))


class Ledger:
    """Typed access to the scripts. Raises the errors of `services.common.errors`."""

    def __init__(self, spec: RunSpec) -> None:
        pool = BlockingConnectionPool(
            host=spec.redis.host,
            port=spec.redis.port,
            max_connections=POOL_SIZE,
            timeout=SOCKET_TIMEOUT_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            # Every script may be repeated: it checks state, token or request_id before it changes anything.
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), RETRIES),
        )
        # redis-py declares every command as both blocking and awaitable, which no type checker can follow.
        self._redis: Any = Redis(connection_pool=pool)
        self._prefix = f"flotilla:{{{spec.run_id}}}:"
        self._spec = spec
        shared = "\n".join((SCRIPTS / f"{name}.lua").read_text() for name in PARTS)
        self._scripts = {
            path.stem: self._redis.register_script(f"{shared}\n{path.read_text()}")
            for path in SCRIPTS.glob("*.lua")
            if path.stem not in PARTS
        }

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose(close_connection_pool=True)

    def _key(self, name: str) -> str:
        return self._prefix + name

    async def _run(self, script: str, *args: Any) -> Any:
        with redis_errors():
            return await self._scripts[script](keys=[self._prefix], args=args)

    async def check_durability(self) -> None:
        """Raise FailedPrecondition unless Redis keeps every acknowledged write; Unavailable if it is away."""
        with redis_errors():
            for name, wanted in REQUIRED_REDIS.items():
                found = (await self._redis.config_get(name)).get(name)
                if found != wanted:
                    raise FailedPrecondition(
                        f"redis at {self._spec.redis.host}:{self._spec.redis.port}: "
                        f"{name} is {found!r}; set it to {wanted!r}, or writes can be lost"
                    )

    # ------------------------------------------------------------------------------------------------ registry

    async def register(self, spec_digest: str, data_digest: str = "") -> None:
        """Make the run known, or check that it is the same one, on the same data where the caller has read it."""
        await self._run("register", spec_digest, self._spec.rollout.num_rollout, data_digest)

    async def run_facts(self) -> dict[str, str]:
        """The facts of the run. Raises NotFound before `register`."""
        with redis_errors():
            fields = await self._redis.hgetall(self._key("run"))
        if b"spec_digest" not in fields:
            raise NotFound(f"run {self._spec.run_id} is not registered")
        return _texts(fields)

    async def begin_epoch(self, request_id: str, step: int, checkpoint: str, digests: Sequence[str]) -> int:
        """Open a new epoch from a checkpoint; returns its number."""
        return int(await self._run("begin_epoch", request_id, step, checkpoint, KEEP_PAYLOAD_S, *digests))

    async def set_desired_state(self, state: str) -> None:
        """RUNNING, PAUSED or STOPPED."""
        await self._run("set_desired_state", state)

    async def record_version(
        self, epoch: int, step: int, state: str, record: bytes, evaluation_sets: dict[str, int]
    ) -> None:
        """Record a version; LIVE issues the evaluation groups that are due, once a step."""
        due = [part for item in evaluation_sets.items() for part in item]
        await self._run("record_version", epoch, step, state, record, *due)

    async def versions(self) -> list[tuple[bytes, str]]:
        """Records and states, newest first."""
        with redis_errors():
            records = await self._redis.hgetall(self._key("versions"))
            states = await self._redis.hgetall(self._key("version_states"))
        order = sorted(records, key=lambda name: tuple(map(int, name.split(b":"))), reverse=True)
        return [(records[name], states[name].decode()) for name in order]

    # ------------------------------------------------------------------------------------------------ work

    async def lease_work(self, request_id: str, worker_id: str, max_groups: int) -> list[tuple[str, str]]:
        """Lease groups; returns (group, token) pairs."""
        rollout = self._spec.rollout
        size = rollout.rollout_batch_size
        flat = await self._run(
            "lease_work", request_id, worker_id, max_groups, _ms(rollout.lease_ttl_s), secrets.token_hex(8),
            size, size, MAX_STALENESS,
        )  # fmt: skip
        texts = [item.decode() for item in flat]
        return list(zip(texts[::2], texts[1::2], strict=True))

    async def renew(self, group_id: str, token: str) -> tuple[str, bool]:
        """Extend a lease; returns the desired state, and whether an evaluation group's version is gone."""
        state, gone = await self._run("renew", group_id, token, _ms(self._spec.rollout.lease_ttl_s))
        return state.decode(), bool(gone)

    async def submit(self, group_id: str, token: str, group_size: int, samples: Sequence[FinishedSample]) -> bool:
        """Store finished samples; returns True if the group is complete."""
        args: list[Any] = [sum(s.header.response_tokens for s in samples)]
        for sample in samples:
            args += [sample.index, sample.header.dump(), sample.content_hash, sample.payload]
        return bool(await self._run("submit", group_id, token, group_size, *args))

    async def release(self, group_id: str, token: str, error: str) -> None:
        """Give a lease back; an error counts as a failed attempt."""
        await self._run("release", group_id, token, error, self._spec.rollout.max_attempts)

    async def expire(self) -> int:
        """Take back lapsed leases, end late evaluations; returns how many groups moved."""
        deadline_ms = _ms(self._spec.evaluation.deadline_s)
        return int(await self._run("expire", self._spec.rollout.max_attempts, deadline_ms))

    # ------------------------------------------------------------------------------------------------ grading

    async def score(self, group_id: str, rewards: Sequence[float], verdicts: Sequence[str]) -> None:
        """GENERATED to SCORED."""
        await self._run("score", group_id, json.dumps(list(rewards)), json.dumps(list(verdicts)), KEEP_PAYLOAD_S)

    async def settle(self, group_id: str, drop_reason: str, rewards: Sequence[float]) -> None:
        """SCORED to KEPT, or to DROPPED with a reason."""
        await self._run("settle", group_id, drop_reason, sum(rewards), len(rewards), KEEP_PAYLOAD_S)

    async def fail_group(self, group_id: str, reason: str, message: str) -> None:
        """GENERATED to FAILED."""
        await self._run("fail_group", group_id, reason, message)

    # ------------------------------------------------------------------------------------------------ batches

    async def interval(self) -> dict[str, str]:
        """What happened since the last seal, and `now_ms`."""
        with redis_errors():
            fields = await self._redis.hgetall(self._key("interval"))
            clock = await self._redis.time()
        return _texts(fields) | {"now_ms": str(clock[0] * 1000 + clock[1] // 1000)}

    async def seal(self, batch: int, digest: str, manifest: bytes, group_ids: Sequence[str]) -> None:
        """KEPT to READY, as a batch; without effect if the batch is sealed already."""
        await self._run("seal", batch, digest, manifest, *group_ids)

    async def lease_batch(self, run_epoch: int) -> tuple[int, bytes]:
        """The oldest batch that is not acknowledged and its manifest; -1 if none is sealed, -2 if the run is done."""
        answer = await self._run("lease_batch", run_epoch)
        return int(answer[0]), answer[1] if len(answer) > 1 else b""

    async def ack_batch(self, run_epoch: int, batch: int, digest: str) -> None:
        """IN_TRAINING to TRAINED."""
        await self._run("ack_batch", run_epoch, batch, digest)

    async def commit(self, run_epoch: int, step: int, checkpoint: str) -> None:
        """Every batch below `step` to COMMITTED."""
        await self._run("commit", run_epoch, step, checkpoint, KEEP_PAYLOAD_S)

    async def batches(self, first: int, count: int) -> list[tuple[int, Fields]]:
        """Batches from `first` on, as many as there are up to `count`."""
        sealed = int((await self.run_facts()).get("sealed", 0))
        numbers = range(first, min(first + count, sealed))
        return list(zip(numbers, await self._hashes(f"batch:{number}" for number in numbers), strict=True))

    # ------------------------------------------------------------------------------------------------ reading

    async def group_ids(self, ledger: str, state: State, start: int = 0, count: int = 1000) -> list[str]:
        """Groups in a state, oldest first; `ledger` is train or eval."""
        with redis_errors():
            ids = await self._redis.zrange(self._key(f"{ledger}:{state}"), start, start + count - 1)
        return [one.decode() for one in ids]

    async def groups(self, group_ids: Sequence[str]) -> list[Group]:
        """The groups, in order. Raises NotFound for one that was never issued."""
        found = []
        for group_id, fields in zip(group_ids, await self._hashes(f"group:{g}" for g in group_ids), strict=True):
            if not fields:
                raise NotFound(f"group {group_id} was never issued")
            found.append(Group(group_id, fields))
        return found

    async def payloads(self, rows: Iterable[tuple[str, int]]) -> list[bytes | None]:
        """Serialized samples by (group, index); None where they have expired."""
        keys = [self._key(f"payload:{group_id}:{index}") for group_id, index in rows]
        if not keys:
            return []
        with redis_errors():
            return await self._redis.mget(keys)

    async def evaluation_group_ids(self, step: int, name: str) -> list[str]:
        """Groups of one evaluation, in order of the data file; empty if there is none."""
        with redis_errors():
            ids = await self._redis.lrange(self._key(f"evaluation:{step}:{name}"), 0, -1)
        return [one.decode() for one in ids]

    async def evaluations(self) -> list[tuple[int, str]]:
        """(step, set) of every evaluation there is, sorted."""
        with redis_errors():
            members = await self._redis.smembers(self._key("evaluations"))
        pairs = [one.decode().split(":", 1) for one in members]
        return sorted((int(step), name) for step, name in pairs)

    async def stats(self) -> Stats:
        """Counts of one instant."""
        run, train, evaluation, dropped, failed = await self._run("stats", *State)
        return Stats(
            run=_texts(_pairs(run)),
            train=dict(zip(State, map(int, train), strict=True)),
            evaluation=dict(zip(State, map(int, evaluation), strict=True)),
            dropped={k: int(v) for k, v in _texts(_pairs(dropped)).items()},
            failed={k: int(v) for k, v in _texts(_pairs(failed)).items()},
        )

    async def _hashes(self, names: Iterable[str]) -> list[Fields]:
        with redis_errors():
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(self._key(name))
                return await pipe.execute()


def _texts(fields: Fields) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in fields.items()}


def _pairs(flat: Sequence[bytes]) -> Fields:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
