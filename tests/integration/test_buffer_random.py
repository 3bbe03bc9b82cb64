"""Random lives of many groups against a real Redis, checked after every step against a model written here.

Gateways and trainers that come, stall, crash and repeat themselves; the only rule is what the contracts allow them to
do. The reward service is played by calling the ledger.
"""

from __future__ import annotations

import asyncio
import random
import uuid

import pytest

from services.buffer.ledger import FinishedSample, Ledger, SampleHeader
from services.buffer.seal import make_manifest
from services.buffer.states import MOVES, State
from services.common.errors import Aborted, FailedPrecondition
from tests.buffer_harness import make_spec, start_redis

SAMPLES = 2
BATCH = 2
STEPS = 800


class Player:
    """Acts at random and remembers what it was promised."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger, self.random = ledger, random.Random(seed)
        self.leases: list[tuple[str, str]] = []
        self.epoch = 0
        self.digests: list[str] = []
        self.trained: list[str] = []
        """Digests of the batches that the live lineage was trained on."""
        self.saved: list[str] = []
        """The same, as of the last checkpoint."""
        self.states: dict[str, State] = {}
        self.furthest = 0
        """Most batches that any lineage was trained on: the furthest live step."""

    async def start_trainer(self) -> None:
        self.trained = list(self.saved)
        self.epoch = await self.ledger.begin_epoch(uuid.uuid4().hex, len(self.saved), "ckpt", self.saved)
        await self.publish()

    async def publish(self) -> None:
        await self.ledger.record_version(self.epoch, len(self.trained), "LIVE", b"", {})

    async def lease(self) -> None:
        self.leases += await self.ledger.lease_work(uuid.uuid4().hex, "w", self.random.randint(1, 3))

    async def submit(self) -> None:
        if not self.leases:
            return
        group_id, token = self.random.choice(self.leases)
        header = SampleHeader(3, 2, 2, 1, 0, ["1:0"])
        index = self.random.randrange(SAMPLES)
        sample = FinishedSample(index, header, f"{group_id}:{index}".encode())
        try:
            await self.ledger.submit(group_id, token, SAMPLES, [sample])
        except Aborted:
            self.leases.remove((group_id, token))

    async def release(self) -> None:
        if self.leases:
            group_id, token = self.leases.pop(self.random.randrange(len(self.leases)))
            await self.ledger.release(group_id, token, self.random.choice(["", "broken"]))

    async def forget_leases(self) -> None:
        """A gateway is killed: its leases lapse."""
        for group_id, token in self.leases:
            await self.ledger.release(group_id, token, "the lease expired")
        self.leases = []

    async def grade(self) -> None:
        for group_id in await self.ledger.group_ids("train", State.GENERATED):
            rewards = [float(self.random.random() < 0.5) for _ in range(SAMPLES)]
            await self.ledger.score(group_id, rewards, ["SCORED:CORRECT"] * SAMPLES)
            if self.random.random() < 0.3:
                return
        for group_id in await self.ledger.group_ids("train", State.SCORED):
            rewards = (await self.ledger.groups([group_id]))[0].rewards()
            await self.ledger.settle(group_id, "" if rewards[0] != rewards[1] else "zero_std", rewards)

    async def seal(self) -> None:
        kept = await self.ledger.group_ids("train", State.KEPT, count=BATCH)
        if len(kept) < BATCH:
            return
        batch = int((await self.ledger.run_facts()).get("sealed", 0))
        groups = await self.ledger.groups(sorted(kept))
        manifest = make_manifest(batch, groups, 1, await self.ledger.interval())
        for _ in range(self.random.randint(1, 2)):
            await self.ledger.seal(batch, manifest.digest, manifest.SerializeToString(), sorted(kept))

    async def train(self) -> None:
        batch, _ = await self.ledger.lease_batch(self.epoch)
        if batch < 0:
            return
        assert batch == len(self.trained), "batches come in order, none twice, none left out"
        digest = dict(await self.ledger.batches(batch, 1))[batch][b"digest"].decode()
        if batch < len(self.digests):
            assert self.digests[batch] == digest, "a replayed batch has its old content"
        else:
            self.digests.append(digest)
        if self.random.random() < 0.2:
            return  # stalls before the ack; leases the same batch again later
        await self.ledger.ack_batch(self.epoch, batch, digest)
        await self.ledger.ack_batch(self.epoch, batch, digest)
        self.trained.append(digest)
        await self.publish()

    async def save(self) -> None:
        self.saved = list(self.trained)
        if self.random.random() < 0.7:  # else: killed between the checkpoint and its commit
            await self.ledger.commit(self.epoch, len(self.saved), "ckpt")

    async def crash_trainer(self) -> None:
        old = self.epoch
        await self.start_trainer()
        for stale in (self.ledger.lease_batch(old), self.ledger.commit(old, 0, "x")):
            with pytest.raises(Aborted):
                await stale

    async def foreign_checkpoint(self) -> None:
        if self.saved:
            with pytest.raises(FailedPrecondition):
                await self.ledger.begin_epoch(uuid.uuid4().hex, len(self.saved), "x", ["0"] * len(self.saved))

    async def check(self) -> None:
        stats = await self.ledger.stats()
        issued = stats.number("issued")
        assert issued == sum(stats.train.values()), "conservation"
        groups = await self.ledger.groups([f"g{i:08d}" for i in range(issued)])
        now = {group.group_id: group.state for group in groups}
        for state, count in stats.train.items():
            assert count == sum(one is state for one in now.values()), state
        for group_id, state in now.items():
            before = self.states.get(group_id, State.WAITING)
            assert before is state or self._reaches(before, state), (group_id, before, state)
        self.states = now
        out = sum(state not in (State.DROPPED, State.STALE, State.FAILED) for state in now.values())
        self.furthest = max(self.furthest, len(self.trained))
        assert out <= (self.furthest + 1) * BATCH, "the admission bound"
        assert stats.number("committed_step") <= len(self.saved)

    @staticmethod
    def _reaches(before: State, after: State) -> bool:
        seen, frontier = {before}, {before}
        while frontier:
            frontier = {t for s in frontier for t in MOVES[s]} - seen
            seen |= frontier
        return after in seen


@pytest.mark.parametrize("seed", range(6))
async def test_random_lives_conserve_every_group(tmp_path, seed):
    redis = start_redis(tmp_path / "redis")
    ledger = Ledger(make_spec(tmp_path, redis.port, num_rollout=12, max_attempts=4))
    try:
        await ledger.register("digest")
        player = Player(ledger, seed)
        await player.start_trainer()
        actions = [
            *[player.lease] * 4, *[player.submit] * 16, *[player.grade] * 4, *[player.seal] * 3, *[player.train] * 3,
            player.release, player.forget_leases, player.save, player.crash_trainer, player.foreign_checkpoint,
        ]  # fmt: skip
        for step in range(STEPS):
            if step % 100 == 99:  # Redis itself is killed: nothing that was acknowledged is lost
                redis.kill()
                await asyncio.to_thread(redis.start)
            await player.random.choice(actions)()
            await player.check()
        assert player.furthest >= 3, "something was trained"
    finally:
        await ledger.close()
        redis.stop()


async def test_a_cancelled_call_does_not_poison_the_connection(tmp_path):
    """The answer to a cancelled command must not reach the next caller (CVE-2023-28858)."""
    redis = start_redis(tmp_path / "redis")
    ledger = Ledger(make_spec(tmp_path, redis.port))
    try:
        await ledger.register("digest")
        for delay in range(60):
            task = asyncio.ensure_future(ledger.stats())
            await asyncio.sleep(delay * 2e-5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await ledger.run_facts())["spec_digest"] == "digest"
            assert await ledger.group_ids("train", State.WAITING) == []
    finally:
        await ledger.close()
        redis.stop()


async def test_a_redis_that_may_lose_writes_is_refused(tmp_path):
    redis = start_redis(tmp_path / "redis")
    ledger = Ledger(make_spec(tmp_path, redis.port))
    try:
        await ledger.check_durability()
        await ledger._redis.config_set("appendfsync", "everysec")
        with pytest.raises(FailedPrecondition, match="appendfsync"):
            await ledger.check_durability()
    finally:
        await ledger.close()
        redis.stop()
