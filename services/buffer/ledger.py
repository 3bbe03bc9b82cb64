"""The ledger of one run in Redis: every change is one Lua script, so it happens whole or not at all.

Invariant: issued = the sum of the groups in all states, at every instant. A crash of this process between two calls
leaves the ledger in a state from which the loops of `work.py` go on.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from services.buffer.connection import open_redis
from services.buffer.errors import RedisFull, redis_errors
from services.buffer.pipeline import Pipelines
from services.buffer.records import Fields, FinishedSample, Fragment, Group, Lease, Stats, Stop
from services.buffer.states import IN_PLAY, State
from services.common.errors import NotFound
from services.common.spec import RunSpec

SCRIPTS = Path(__file__).parent / "lua"
PARTS = ("prelude", "leases", "batches")
"""Files of shared functions that stand before every script."""
KEEP_PAYLOAD_S = 3600
"""How long tokens stay readable that are no longer needed, unless memory is short."""


class Ledger:
    """Typed access to the scripts. Raises the errors of `services.common.errors`."""

    def __init__(self, spec: RunSpec) -> None:
        # redis-py declares every command as both blocking and awaitable, which no type checker can follow.
        self.redis: Any = open_redis(spec.redis)
        self._pipelines = Pipelines(self.redis)
        self.prefix = f"flotilla:{{{spec.run_id}}}:"
        self._spec = spec
        shared = "\n".join((SCRIPTS / f"{name}.lua").read_text() for name in PARTS)
        self._scripts = {
            path.stem: self.redis.register_script(f"{shared}\n{path.read_text()}")
            for path in SCRIPTS.glob("*.lua")
            if path.stem not in PARTS
        }

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose(close_connection_pool=True)

    def _key(self, name: str) -> str:
        return self.prefix + name

    async def _run(self, script: str, *args: Any) -> Any:
        with redis_errors():
            return await self._pipelines.script(self._scripts[script], [self.prefix], args)

    # ------------------------------------------------------------------------------------------------ registry

    async def register(self, spec_digest: str, data_digest: str = "") -> None:
        """Make the run known, or check that it is the same one, on the same data where the caller has read it."""
        policy = [part for item in _policy(self._spec).items() for part in item]
        await self._run("register", spec_digest, self._spec.rollout.num_rollout, data_digest, *policy)

    async def run_facts(self) -> dict[str, str]:
        """The facts of the run. Raises NotFound before `register`."""
        with redis_errors():
            fields = await self._pipelines.call("HGETALL", self._key("run"))
        if b"spec_digest" not in fields:
            raise NotFound(f"run {self._spec.run_id} is not registered")
        return _texts(fields)

    async def begin_epoch(self, request_id: str, step: int, checkpoint: str, digests: Sequence[str]) -> int:
        """Open a new epoch from a checkpoint; returns its number."""
        return int(await self._run("begin_epoch", request_id, step, checkpoint, *digests))

    async def rewind(self, request_id: str, step: int) -> tuple[int, int]:
        """Take committed batches from `step` on back; returns the new lineage, and how many prompts are issued anew."""
        lineage, reissued = await self._run("rewind", request_id, step)
        return int(lineage), int(reissued)

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
            records = await self.redis.hgetall(self._key("versions"))
            states = await self.redis.hgetall(self._key("version_states"))
        order = sorted(records, key=lambda name: tuple(map(int, name.split(b":"))), reverse=True)
        return [(records[name], states[name].decode()) for name in order]

    # ------------------------------------------------------------------------------------------------ work

    async def lease_work(
        self,
        request_id: str,
        worker_id: str,
        max_groups: int,
        *,
        back_pressure: bool = False,
        chosen: Sequence[str] | None = None,
    ) -> list[tuple[str, str]] | None:
        """Lease groups; returns (group, token) pairs, or None if the worker is drained.

        Args:
            request_id: The same one brings the same leases again, as long as they live.
            worker_id: Who asks.
            max_groups: At most so many.
            back_pressure: Issue no fresh group, as long as a commit can free memory.
            chosen: Interrupted groups that may go on, in order; None takes all, oldest first.
        """
        flat = await self._run(
            "lease_work", request_id, worker_id, max_groups, _ms(self._spec.rollout.lease_ttl_s), secrets.token_hex(8),
            int(back_pressure), int(chosen is not None), *(chosen or ()),
        )  # fmt: skip
        if flat is None:
            return None
        texts = [item.decode() for item in flat]
        return list(zip(texts[::2], texts[1::2], strict=True))

    async def renew(self, group_id: str, token: str, fragments: Sequence[Fragment] = ()) -> str:
        """Extend a lease and save tokens; returns why it must stop, or ''. RedisFull extends it without saving."""
        head = ("renew", group_id, token, _ms(self._spec.rollout.lease_ttl_s))
        try:
            return (await self._run(*head, *_flat(fragments))).decode()
        except RedisFull:
            await self._run(*head)
            raise

    async def submit(self, group_id: str, token: str, group_size: int, samples: Sequence[FinishedSample]) -> bool:
        """Store finished samples; returns True if the group is complete."""
        args: list[Any] = [sum(s.header.response_tokens for s in samples)]
        for one in samples:
            args += [one.index, one.header.dump(), one.content_hash, one.header.oldest_step, one.payload]
        return bool(await self._run("submit", group_id, token, group_size, *args))

    async def release(self, group_id: str, token: str, error: str, fragments: Sequence[Fragment] = ()) -> None:
        """Save tokens and give a lease back; an error counts as a failed attempt."""
        await self._run("release", group_id, token, error, *_flat(fragments))

    async def drain(self, worker_id: str) -> None:
        """Give a worker no more leases, and let those that it has stop."""
        await self._run("drain", worker_id)

    async def stops(self, worker_id: str) -> tuple[int, list[Stop]]:
        """How many leases a worker holds, and those that must stop."""
        held, *flat = await self._run("stops", worker_id)
        texts = [item.decode() for item in flat]
        return int(held), [Stop(*texts[at : at + 3]) for at in range(0, len(texts), 3)]

    async def leases(self, start: int, count: int) -> list[Lease]:
        """Leases, the first to lapse first."""
        flat = await self._run("list_leases", start, start + count - 1)
        return [Lease(flat[i].decode(), int(flat[i + 1]), flat[i + 2].decode()) for i in range(0, len(flat), 3)]

    async def expire(self, let_go_now: bool = False) -> tuple[int, int]:
        """Take back lapsed leases, end what is late or too old, and let go of tokens that nobody needs.

        Returns how many groups moved, and the tokens of how many went; there may be more.
        """
        deadline_ms = _ms(self._spec.evaluation.deadline_s)
        moved, gone = await self._run("expire", deadline_ms, int(let_go_now))
        return int(moved), int(gone)

    async def fragments(self, rows: Sequence[tuple[str, int]]) -> list[list[bytes]]:
        """Serialized fragments of unfinished samples by (group, index), in order."""
        with redis_errors():
            async with self.redis.pipeline(transaction=False) as pipe:
                for group_id, index in rows:
                    pipe.lrange(self._key(f"partial:{group_id}:{index}"), 0, -1)
                return await pipe.execute()

    # ------------------------------------------------------------------------------------------------ grading

    async def score(self, group_id: str, rewards: Sequence[float], verdicts: Sequence[str]) -> bool:
        """GENERATED to SCORED; False if it was not GENERATED."""
        return await self._run("score", group_id, json.dumps(list(rewards)), json.dumps(list(verdicts))) == 1

    async def settle(
        self, group_id: str, keep: bool, reason: str, rewards: Sequence[float], *, keep_when_insufficient: bool = False
    ) -> None:
        """SCORED to KEPT or STALE, or to DROPPED with a reason.

        Args:
            group_id: The group.
            keep: What the filter says.
            reason: Why it is dropped.
            rewards: For the counts since the last seal.
            keep_when_insufficient: Keep it even so if no more groups than a batch needs would be left.
        """
        await self._run(
            "settle", group_id, int(keep), reason, int(keep_when_insufficient), sum(rewards), len(rewards)
        )  # fmt: skip

    async def fail_group(self, group_id: str, state: State, reason: str, message: str) -> None:
        """GENERATED or SCORED to FAILED; counted under the reason."""
        await self._run("fail_group", group_id, state, reason, message)

    # ------------------------------------------------------------------------------------------------ batches

    async def interval(self, batch: int) -> dict[str, str]:
        """What happened since the last seal, set aside for this batch, and `now_ms`."""
        fields, now_ms = await self._run("interval", batch)
        return _texts(_pairs(fields)) | {"now_ms": str(now_ms)}

    async def seal(self, batch: int, digest: str, manifest: bytes, group_ids: Sequence[str]) -> bool:
        """KEPT to READY, as a batch; False, without effect, if the batch is sealed already or a group is not KEPT."""
        return await self._run("seal", batch, digest, manifest, *group_ids) == 1

    async def lease_batch(self, run_epoch: int) -> tuple[int, bytes, bool]:
        """The oldest batch that is not acknowledged, its manifest, and whether a trained one is not committed.

        The batch is -1 if none is sealed, -2 if the run is complete.
        """
        batch, uncommitted, *manifest = await self._run("lease_batch", run_epoch)
        return int(batch), manifest[0] if manifest else b"", bool(uncommitted)

    async def ack_batch(self, run_epoch: int, batch: int, digest: str) -> None:
        """IN_TRAINING to TRAINED."""
        await self._run("ack_batch", run_epoch, batch, digest)

    async def commit(self, run_epoch: int, step: int, checkpoint: str) -> None:
        """Every batch below `step` to COMMITTED."""
        await self._run("commit", run_epoch, step, checkpoint)

    async def batches(self, first: int, count: int) -> list[tuple[int, Fields]]:
        """Batches from `first` on, as many as there are up to `count`."""
        sealed = int((await self.run_facts()).get("sealed", 0))
        numbers = range(first, min(first + count, sealed))
        found = zip(numbers, await self._hashes(f"batch:{number}" for number in numbers), strict=True)
        return [(number, fields) for number, fields in found if fields]  # a rewind may have come between

    # ------------------------------------------------------------------------------------------------ reading

    async def group_ids(self, ledger: str, state: State, start: int = 0, count: int = 1000) -> list[str]:
        """Groups in a state, oldest first (KEPT: in the order they were kept); `ledger` is train or eval."""
        with redis_errors():
            ids = await self._pipelines.call("ZRANGE", self._key(f"{ledger}:{state}"), start, start + count - 1)
        return [one.decode() for one in ids]

    async def issued_ids(self, ledger: str, start: int, count: int) -> list[str]:
        """Groups in any state, in the order of issue; `ledger` is train or eval."""
        if ledger == "train":
            issued = int((await self.run_facts()).get("issued", 0))
            return [f"g{number:08d}" for number in range(start, min(start + count, issued))]
        with redis_errors():
            async with self.redis.pipeline(transaction=True) as pipe:
                for state in State:
                    pipe.zrange(self._key(f"eval:{state}"), 0, -1, withscores=True)
                found = [pair for members in await pipe.execute() for pair in members]
        return [one.decode() for one, _ in sorted(found, key=lambda pair: pair[1])][start : start + count]

    async def oldest_in_play(self) -> int | None:
        """Lowest issue number of the groups that are in play."""
        with redis_errors():
            async with self.redis.pipeline(transaction=True) as pipe:
                for state in IN_PLAY:
                    pipe.zrange(self._key(f"train:{state}"), 0, 0, withscores=True)
                return min((int(found[0][1]) for found in await pipe.execute() if found), default=None)

    async def aging(self) -> dict[str, int]:
        """Groups in play that have tokens, or a lease, with the oldest policy step of these."""
        with redis_errors():
            found = await self.redis.zrange(self._key("aging"), 0, -1, withscores=True)
        return {group_id.decode(): int(step) for group_id, step in found}

    async def groups(self, group_ids: Sequence[str]) -> list[Group]:
        """The groups, in order. Raises NotFound for one that was never issued."""
        found = []
        for group_id, fields in zip(group_ids, await self._hashes(f"group:{g}" for g in group_ids), strict=True):
            if not fields:
                raise NotFound(f"group {group_id} was never issued")
            found.append(Group(group_id, fields))
        return found

    async def payloads(self, rows: Iterable[tuple[str, int]]) -> list[bytes | None]:
        """Serialized samples by (group, index); None where they are gone."""
        keys = [self._key(f"payload:{group_id}:{index}") for group_id, index in rows]
        if not keys:
            return []
        with redis_errors():
            return await self.redis.mget(keys)

    async def evaluation_group_ids(self, step: int, name: str) -> list[str]:
        """Groups of one evaluation, in order of the data file; empty if there is none."""
        with redis_errors():
            ids = await self.redis.lrange(self._key(f"evaluation:{step}:{name}"), 0, -1)
        return [one.decode() for one in ids]

    async def evaluations(self) -> list[tuple[int, str]]:
        """(step, set) of every evaluation there is, sorted."""
        with redis_errors():
            members = await self.redis.smembers(self._key("evaluations"))
        pairs = [one.decode().split(":", 1) for one in members]
        return sorted((int(step), name) for step, name in pairs)

    async def stats(self) -> Stats:
        """Counts of one instant."""
        run, train, evaluation, dropped, failed, stale, discarded, leases = await self._run("stats", *State)
        return Stats(
            run=_texts(_pairs(run)),
            train=dict(zip(State, map(int, train), strict=True)),
            evaluation=dict(zip(State, map(int, evaluation), strict=True)),
            dropped=_counts(dropped),
            failed=_counts(failed),
            stale=_counts(stale),
            discarded=_counts(discarded),
            leases=int(leases),
        )

    async def _hashes(self, names: Iterable[str]) -> list[Fields]:
        with redis_errors():
            return await asyncio.gather(*(self._pipelines.call("HGETALL", self._key(name)) for name in names))


def _policy(spec: RunSpec) -> dict[str, int]:
    """What the scripts know of the run spec."""
    rollout = spec.rollout
    return {
        "batch_size": rollout.rollout_batch_size,
        "over_sampling": rollout.over_sampling,
        "refill_batch": int(rollout.refill == "batch"),
        "fallback": int(rollout.dynamic_sampling_filter == "nonzero_std_with_fallback"),
        "samples": rollout.n_samples_per_prompt,
        "evaluation_samples": spec.evaluation.n_samples_per_prompt,
        "max_staleness": rollout.max_staleness,
        "max_sample_age": rollout.sample_age,
        "partial_rollout": int(rollout.partial_rollout),
        "max_attempts": rollout.max_attempts,
        "keep_payload_ms": _ms(KEEP_PAYLOAD_S),
    }


def _flat(fragments: Iterable[Fragment]) -> list[Any]:
    return [x for f in fragments for x in (f.index, f.begin, f.tokens, f.oldest_step, f.newest_step, f.payload)]


def _texts(fields: Fields) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in fields.items()}


def _counts(flat: Sequence[bytes]) -> dict[str, int]:
    return {name: int(count) for name, count in _texts(_pairs(flat)).items()}


def _pairs(flat: Sequence[bytes]) -> Fields:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
