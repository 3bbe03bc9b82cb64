"""Reads, in slices, what a snapshot of the ledger names, and has it checked in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from services.buffer.audit_contents import (
    SavedTokens,
    check_groups,
    check_key,
    check_manifest,
    check_samples,
    check_saved,
    indices,
    is_readable,
    is_released,
)
from services.buffer.audit_laws import Discrepancy
from services.buffer.audit_snapshot import SCAN_COUNT, Batch, Snapshot
from services.buffer.records import Group

GROUPS_AT_ONCE = 256
SLICE_BYTES = 4 << 20
"""Content that is held at once; a single sample may be larger."""
TOKEN_BYTES = 16
"""What a saved token takes, at most: id, log-probability, and some of a span."""
NO_STEP = 1 << 62
EACH = "local out = {} for at, key in ipairs(KEYS) do out[at] = redis.call(ARGV[1], key) end return out"
"""One call instead of one a key: what a client does for each of many takes longer than the command."""

T = TypeVar("T")


class Reader:
    """One pass over groups, batches and keys, in this order."""

    def __init__(self, redis: Any, prefix: str, snapshot: Snapshot) -> None:
        self._redis = redis
        self._prefix = prefix
        self._snapshot = snapshot
        self._held: dict[str, int] = {}
        self.samples = 0
        """Samples whose content was checked."""
        self.prompts: dict[str, int] = {}
        """Number of the prompt of each training group."""

    async def check_groups(self, group_ids: Sequence[str]) -> list[Discrepancy]:
        """Hashes and content of some groups."""
        groups = await self._groups(group_ids)
        found = await asyncio.to_thread(check_groups, groups, self._snapshot)
        groups = [one for one in groups if one.fields and is_readable(one)]
        self.prompts |= {one.group_id: one.prompt_number for one in groups if not one.is_evaluation}
        held = [(one, indices(one)) for one in groups if not is_released(one.group_id, self._snapshot)]
        found += await self._check_samples([(one, index) for one, has in held for index in sorted(has.hashes)])
        return found + await self._check_saved([(one, index) for one, has in held for index in sorted(has.saved)])

    async def check_batch(self, batch: Batch) -> list[Discrepancy]:
        """Manifest and digest of a batch."""
        content = await self._redis.hget(f"{self._prefix}batch:{batch.name}", "manifest")
        groups: list[Group] = []
        if not all(is_released(group_id, self._snapshot) for group_id in batch.groups):
            groups = [group for group_ids in slices(batch.groups) for group in await self._groups(group_ids)]
        return await asyncio.to_thread(check_manifest, batch, content, groups)

    async def check_keys(self) -> list[Discrepancy]:
        """Keys that nothing accounts for."""
        found: list[Discrepancy] = []
        async for key in self._redis.scan_iter(match=f"{self._prefix}*", count=SCAN_COUNT):
            found += check_key(key.decode().removeprefix(self._prefix), self._snapshot, self._held)
        return found

    async def _groups(self, group_ids: Sequence[str]) -> list[Group]:
        hashes = await self._each("HGETALL", [f"group:{group_id}" for group_id in group_ids])
        fields = (dict(zip(flat[::2], flat[1::2], strict=True)) for flat in hashes)
        return [Group(*pair) for pair in zip(group_ids, fields, strict=True)]

    async def _each(self, command: str, names: Sequence[str]) -> list[Any]:
        """The answers to one command on many keys."""
        return await self._redis.eval(EACH, len(names), *(self._prefix + name for name in names), command)

    async def _check_samples(self, rows: Sequence[tuple[Group, int]]) -> list[Discrepancy]:
        names = [self._note("payload", group, index) for group, index in rows]
        sizes, found = await self._each("STRLEN", names), []
        for some in slices(list(zip(rows, names, strict=True)), sizes, SLICE_BYTES):
            payloads = await self._redis.mget([self._prefix + name for _, name in some])
            found += await asyncio.to_thread(check_samples, [row for row, _ in some], payloads)
            self.samples += sum(payload is not None for payload in payloads)
        return found

    async def _check_saved(self, rows: Sequence[tuple[Group, int]]) -> list[Discrepancy]:
        sizes, found = [TOKEN_BYTES * group.number(f"p:{index}") for group, index in rows], []
        for some in slices(rows, sizes, SLICE_BYTES):
            found += await asyncio.to_thread(check_saved, await self._saved(some))
        return found

    async def _saved(self, rows: Sequence[tuple[Group, int]]) -> list[SavedTokens]:
        """Fragments and what is said of them, of one instant."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for group, index in rows:
                key = f"{self._prefix}group:{group.group_id}"
                pipe.hmget(key, f"p:{index}", f"f:{index}", "partial_oldest", "newest")
                pipe.lrange(self._prefix + self._note("partial", group, index), 0, -1)
            answers = await pipe.execute()
        return [
            SavedTokens(
                group_id=group.group_id,
                index=index,
                tokens=int(tokens or 0),
                begins=(begins or b"").decode(),
                oldest=int(oldest or NO_STEP),
                newest=int(newest or -1),
                fragments=fragments,
            )
            for (group, index), (tokens, begins, oldest, newest), fragments in zip(
                rows, answers[::2], answers[1::2], strict=True
            )
        ]

    def _note(self, kind: str, group: Group, index: int) -> str:
        """Notes that a group accounts for content, whose name this is."""
        owner = f"{kind}:{group.group_id}"
        self._held[owner] = self._held.get(owner, 0) | 1 << index
        return f"{owner}:{index}"


def slices(
    items: Sequence[T], sizes: Sequence[int] | None = None, limit: int = GROUPS_AT_ONCE
) -> Iterator[Sequence[T]]:
    """Consecutive items whose sizes, 1 unless given, add up to at most the limit; a larger one alone."""
    start, total = 0, 0
    for at, size in enumerate(sizes or [1] * len(items)):
        if at > start and total + size > limit:
            yield items[start:at]
            start, total = at, 0
        total += size
    if items[start:]:
        yield items[start:]
