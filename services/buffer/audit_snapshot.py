"""What the audit reads in one transaction: the sets, counters and batches of a ledger at one instant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from services.buffer.states import TERMINAL, State

LEDGERS = {"train": "issued", "eval": "eval_issued"}
"""Ledgers, and what counts the groups ever issued in each."""
REASONS = (
    ("train", State.DROPPED),
    ("train", State.STALE),
    ("train", State.FAILED),
    ("eval", State.FAILED),
)
"""States whose groups are counted by reason."""
ORDERED = ("leases", "aging", "retained")
BATCHES = """
local out = {}
for at, key in ipairs(KEYS) do out[at] = redis.call('HMGET', key, 'state', 'digest', 'groups', 'commits') end
return out
"""
SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch without its manifest."""

    name: str
    """`3`, or `3@1` for one that lineage 1 took back."""
    state: str
    """Empty if there is no such key."""
    digest: str
    groups: tuple[str, ...]
    commits: int

    @property
    def number(self) -> int:
        """Its number in its lineage."""
        return int(self.name.partition("@")[0])

    @property
    def is_taken_back(self) -> bool:
        """True if a rewind has replaced it."""
        return "@" in self.name


@dataclass(frozen=True)
class Snapshot:
    """One instant."""

    run: Mapping[str, str]
    policy: Mapping[str, str]
    sets: Mapping[str, Mapping[State, Mapping[str, int]]]
    """By ledger and state: the groups, with their order; 0 for those at the end of their life."""
    ordered: Mapping[str, Mapping[str, int]]
    """`leases`, `aging` and `retained`: the groups, with their score."""
    reasons: Mapping[tuple[str, State], int]
    """Sum of the counts by reason."""
    evaluations: Mapping[str, tuple[str, ...]]
    """Groups issued for each evaluation, `step:set`."""
    batches: tuple[Batch, ...]

    def number(self, name: str, default: int = 0) -> int:
        """An integer fact of the run."""
        return int(self.run.get(name, default))

    def group_size(self, group_id: str) -> int:
        """Samples in a group."""
        return int(self.policy.get("evaluation_samples" if group_id.startswith("e") else "samples", 0))

    @cached_property
    def state_of(self) -> dict[str, State]:
        """The state of each group; one of those that it is in."""
        by_state = (item for states in self.sets.values() for item in states.items())
        return {group_id: state for state, groups in by_state for group_id in groups}

    @cached_property
    def batch_names(self) -> frozenset[str]:
        """Names of the batches."""
        return frozenset(batch.name for batch in self.batches)

    @cached_property
    def batch_of(self) -> dict[str, Batch]:
        """The batch of each group that is in one."""
        return {group_id: batch for batch in self.batches for group_id in batch.groups}


async def take_snapshot(redis: Any, prefix: str) -> Snapshot:
    """Read one instant."""
    run = _texts(await redis.hgetall(f"{prefix}run"))
    batches = [str(number) for number in range(int(run.get("sealed", 0)))]
    if int(run.get("lineage", 0)):
        batches += await _taken_back(redis, prefix)
    evaluations = sorted(one.decode() for one in await redis.smembers(f"{prefix}evaluations"))
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hgetall(f"{prefix}run").hgetall(f"{prefix}policy")
        for ledger in LEDGERS:
            for state in State:
                # Most groups are at the end of their life, where their order says nothing.
                pipe.zrange(f"{prefix}{ledger}:{state}", 0, -1, withscores=state not in TERMINAL)
        for name in ORDERED:
            pipe.zrange(prefix + name, 0, -1, withscores=True)
        for ledger, state in REASONS:
            pipe.hvals(f"{prefix}{ledger}:{state.lower()}_reasons")
        for name in evaluations:
            pipe.lrange(f"{prefix}evaluation:{name}", 0, -1)
        pipe.eval(BATCHES, len(batches), *(f"{prefix}batch:{name}" for name in batches))
        answers = iter(await pipe.execute())
    return await asyncio.to_thread(_parse, answers, evaluations, batches)


async def _taken_back(redis: Any, prefix: str) -> list[str]:
    keys = redis.scan_iter(match=f"{prefix}batch:*@*", count=SCAN_COUNT)
    return sorted({key.decode().removeprefix(f"{prefix}batch:") async for key in keys})


def _parse(answers: Iterator[Any], evaluations: list[str], batches: list[str]) -> Snapshot:
    return Snapshot(
        run=_texts(next(answers)),
        policy=_texts(next(answers)),
        sets={ledger: {state: _members(state, next(answers)) for state in State} for ledger in LEDGERS},
        ordered={name: _scores(next(answers)) for name in ORDERED},
        reasons={reason: sum(map(int, next(answers))) for reason in REASONS},
        evaluations={name: tuple(one.decode() for one in next(answers)) for name in evaluations},
        batches=tuple(map(_batch, batches, next(answers))),
    )


def _batch(name: str, values: list[bytes | None]) -> Batch:
    state, digest, groups, commits = ((value or b"").decode() for value in values)
    return Batch(name, state, digest, tuple(groups.split()), int(commits or 0))


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in fields.items()}


def _members(state: State, members: list[Any]) -> dict[str, int]:
    return {member.decode(): 0 for member in members} if state in TERMINAL else _scores(members)


def _scores(members: list[tuple[bytes, float]]) -> dict[str, int]:
    return {member.decode(): int(score) for member, score in members}
