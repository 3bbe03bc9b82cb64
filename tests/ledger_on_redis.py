"""The ledger on a real Redis, with the methods of `tests.ledger_model.LedgerModel`.

Redis does not write to disk here: what matters is what the scripts do. Leases lapse because their deadlines are
rewritten, since nobody can move the clock of Redis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from services.buffer import records
from services.buffer.ledger import Ledger
from services.buffer.records import FinishedSample, SampleHeader
from services.buffer.sealing import choose_groups, saves_by_waiting
from services.buffer.states import State
from tests.buffer_harness import make_spec
from tests.ledger_records import RESPONSE_TOKENS, Fragment, Rules

LEASE_TTL_S = 3600.0
"""No lease lapses by itself."""
VOLATILE = ("--appendonly", "no", "--appendfsync", "no")
"""Arguments of a redis-server that is fast and loses everything."""
REWARDS = [1.0, 0.0]


class LedgerOnRedis:
    """The ledger of one run."""

    def __init__(self, directory: Path, port: int, rules: Rules) -> None:
        self.spec = make_spec(
            directory,
            port,
            num_rollout=rules.num_rollout,
            rollout_batch_size=rules.batch_size,
            n_samples_per_prompt=rules.group_size,
            over_sampling_batch_size=rules.over_sampling,
            refill=rules.refill,
            seal_window=rules.seal_window,
            partial_rollout=rules.partial_rollout,
            max_staleness=rules.max_staleness,
            max_sample_age=rules.sample_age,
            max_attempts=rules.max_attempts,
            lease_ttl_s=LEASE_TTL_S,
        )
        self.group_size = rules.group_size
        self.ledger = Ledger(self.spec)
        self.tag = ""
        """What the ledger put into the tokens of the last leases."""

    async def lease_work(self, request_id: str, worker: str, room: int, tag: str, now: int) -> list[tuple[str, str]]:
        leases = await self.ledger.lease_work(request_id, worker, room) or []
        self.tag = leases[0][1].partition(":")[0] if leases else ""
        return leases

    async def renew(self, gid: str, token: str, fragments: Sequence[Fragment], now: int) -> str:
        return await self.ledger.renew(gid, token, [_fragment(f) for f in fragments])

    async def submit(self, gid: str, token: str, samples: dict[int, int]) -> bool:
        size = 1 if gid.startswith("e") else self.group_size
        return await self.ledger.submit(gid, token, size, [finished(gid, *item) for item in samples.items()])

    async def release(self, gid: str, token: str, error: str, fragments: Sequence[Fragment]) -> None:
        await self.ledger.release(gid, token, error, [_fragment(f) for f in fragments])

    async def lapse(self, gid: str) -> None:
        await self.ledger.redis.zadd(f"{self.ledger.prefix}leases", {gid: 1})

    async def expire(self, now: int) -> int:
        return (await self.ledger.expire())[0]

    async def drain(self, worker: str) -> None:
        await self.ledger.drain(worker)

    async def stops(self, worker: str) -> dict[str, str]:
        return {stop.group_id: stop.reason for stop in (await self.ledger.stops(worker))[1]}

    async def score(self, gid: str) -> None:
        await self.ledger.score(gid, REWARDS, ["SCORED:CORRECT", "SCORED:WRONG"])

    async def settle(self, gid: str, drop_reason: str, keep_when_insufficient: bool) -> str:
        (before,) = await self.ledger.groups([gid])
        await self.ledger.settle(
            gid, not drop_reason, drop_reason, REWARDS, keep_when_insufficient=keep_when_insufficient
        )
        (after,) = await self.ledger.groups([gid])
        return after.state if before.state is State.SCORED else ""

    async def next_batch(self, waited: bool) -> list[str]:
        """What the sealer decides, on what it reads from the ledger."""
        rollout = self.spec.rollout
        batch = int((await self.ledger.run_facts()).get("sealed", 0))
        if batch >= rollout.num_rollout:
            return []
        kept = await self.ledger.groups(await self.ledger.group_ids("train", State.KEPT))
        lowest = await self.ledger.oldest_in_play()
        end = (math.inf if lowest is None else lowest + rollout.seal_window) if rollout.seal_window else None
        chosen = choose_groups(kept, batch, rollout.rollout_batch_size, rollout.sample_age, end)
        of_chosen, of_kept = ([one.number("oldest") for one in groups] for groups in (chosen, kept))
        in_play = list((await self.ledger.aging()).values())
        if not waited and saves_by_waiting(
            of_chosen, of_kept, in_play, batch, rollout.rollout_batch_size, rollout.sample_age
        ):
            return []
        return [group.group_id for group in chosen]

    async def seal(self, number: int, digest: str, gids: Sequence[str]) -> None:
        await self.ledger.seal(number, digest, b"manifest", gids)

    async def lease_batch(self, epoch: int) -> int:
        return (await self.ledger.lease_batch(epoch))[0]

    async def ack(self, epoch: int, number: int, digest: str) -> None:
        await self.ledger.ack_batch(epoch, number, digest)

    async def commit(self, epoch: int, step: int) -> None:
        await self.ledger.commit(epoch, step, "checkpoint")

    async def begin_epoch(self, request_id: str, step: int, digests: Sequence[str]) -> int:
        return await self.ledger.begin_epoch(request_id, step, "checkpoint", digests)

    async def record_live(self, epoch: int, step: int, evaluations: dict[str, int]) -> None:
        await self.ledger.record_version(epoch, step, "LIVE", b"", evaluations)

    async def rewind(self, request_id: str, step: int) -> tuple[int, int]:
        return await self.ledger.rewind(request_id, step)

    async def set_desired_state(self, state: str) -> None:
        await self.ledger.set_desired_state(state)


def finished(gid: str, index: int, oldest_step: int) -> FinishedSample:
    """A finished sample whose content says which it is."""
    header = SampleHeader(3, RESPONSE_TOKENS, 2, 1, oldest_step, [f"1:{oldest_step}"])
    return FinishedSample(index, header, f"{gid} {index} {oldest_step}".encode())


def content(one: Fragment) -> bytes:
    """What stands for the tokens of a fragment."""
    return f"{one.begin} {one.end}".encode()


def _fragment(one: Fragment) -> records.Fragment:
    return records.Fragment(one.index, one.begin, one.end - one.begin, one.oldest, one.newest, content(one))
