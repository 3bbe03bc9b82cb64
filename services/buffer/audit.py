"""Audits the ledger of a run: recomputes its laws from the raw keys in Redis, and names every discrepancy. Read-only.

    audit ── up to 3 passes ─┬─ take_snapshot   sets, leases, counters, batches: one transaction, so one instant
                             ├─ snapshot_laws   every group in exactly one state, and what follows from that
                             ├─ groups          hashes; samples against their hash; saved tokens of unfinished ones
                             ├─ batches         rows and digest of every manifest
                             └─ keys            what no group and no batch accounts for

The ledger moves while it is read, so a pass may see a group after it has moved on. Such a sight does not come back word
for word in the next pass; what comes back in every pass is reported. Checks run in threads and content is read in
slices, since this shares an event loop with the service.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from services.buffer.audit_laws import Discrepancy, prompt_laws, snapshot_laws
from services.buffer.audit_reading import Reader, slices
from services.buffer.audit_snapshot import Snapshot, take_snapshot
from services.buffer.errors import redis_errors

PASSES = 3
PAUSE_S = 0.1
"""Between passes: long enough for a call that was under way to end."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found; counts are those of its last pass."""

    groups: int
    """Training groups."""
    evaluation_groups: int
    batches: int
    """In all lineages."""
    samples: int
    """Samples whose content was checked against its hash."""
    committed_groups: int
    """Groups in batches 0 to committed_step - 1, each counted once for every such batch."""
    discrepancies: tuple[Discrepancy, ...]


async def audit(redis: Any, prefix: str) -> Audit:
    """Check everything that the keys of a run say of one another.

    Args:
        redis: A redis.asyncio client that answers in bytes.
        prefix: Of the keys, `flotilla:{run_id}:`.

    Raises:
        Unavailable: Redis is away.
    """
    with redis_errors():
        found = await _one_pass(redis, prefix)
        for _ in range(PASSES - 1):
            if not found.discrepancies:
                break
            await asyncio.sleep(PAUSE_S)
            again, before = await _one_pass(redis, prefix), set(found.discrepancies)
            found = replace(again, discrepancies=tuple(one for one in again.discrepancies if one in before))
        return found


async def _one_pass(redis: Any, prefix: str) -> Audit:
    snapshot = await take_snapshot(redis, prefix)
    found = await asyncio.to_thread(snapshot_laws, snapshot)
    reader = Reader(redis, prefix, snapshot)
    for group_ids in slices(list(snapshot.state_of)):
        found += await reader.check_groups(group_ids)
    for batch in snapshot.batches:
        found += await reader.check_batch(batch)
    found += await asyncio.to_thread(prompt_laws, snapshot, reader.prompts)
    found += await reader.check_keys()
    return Audit(
        groups=sum(map(len, snapshot.sets["train"].values())),
        evaluation_groups=sum(map(len, snapshot.sets["eval"].values())),
        batches=len(snapshot.batches),
        samples=reader.samples,
        committed_groups=_committed_groups(snapshot),
        discrepancies=tuple(dict.fromkeys(found)),
    )


def _committed_groups(snapshot: Snapshot) -> int:
    step = snapshot.number("committed_step")
    return sum(len(batch.groups) for batch in snapshot.batches if not batch.is_taken_back and batch.number < step)
