"""The machine of `tests.ledger_machine` on a real Redis: after every step the ledger is what the model says.

There is no reward service: the machine settles groups itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from services.buffer import records
from services.buffer.states import IN_PLAY, admission_credit
from services.common.errors import FlotillaError
from tests.ledger_machine import LedgerMachine, lives
from tests.ledger_on_redis import VOLATILE, LedgerOnRedis, content
from tests.ledger_records import Batch, Group
from tests.redis_server import RedisServer


class RedisMachine(LedgerMachine):
    """Plays every call on the model and on Redis."""

    directory: ClassVar[Path]
    port: ClassVar[int]
    loop: ClassVar[asyncio.AbstractEventLoop]

    def open(self) -> None:
        self.real = LedgerOnRedis(self.directory, self.port, self.model.rules)
        self.ledger = self.real.ledger
        self.wait(self.ledger.redis.flushall())
        self.wait(self.ledger.register("digest"))

    def wait(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    def call(self, name: str, *args: Any) -> Any:
        try:
            answer = self.wait(getattr(self.real, name)(*args))
        except FlotillaError as error:
            answer = type(error).__name__
        if name == "lease_work":  # the model names the leases as Redis did
            args = (*args[:3], self.real.tag, *args[4:])
        expected = super().call(name, *args)
        assert answer == expected, (name, args, answer, expected)
        return answer

    def next_batch(self, waited: bool) -> list[str]:
        answer, expected = self.wait(self.real.next_batch(waited)), super().next_batch(waited)
        assert answer == expected
        return answer

    @invariant()
    def agrees(self) -> None:
        """State sets, leases, counters, the newest batches, and every group that was touched."""
        self.wait(self.compare(sorted(self.model.touched), self.model.batches[-2:]))
        self.model.touched.clear()

    async def compare(self, gids: list[str], batches: list[Batch]) -> None:
        await self.compare_sets()
        self.compare_run(await self.ledger.run_facts())
        for gid, group in zip(gids, await self.ledger.groups(gids), strict=True):
            _compare_group(self.model.groups[gid], group)
        for batch in batches:
            ((_, fields),) = await self.ledger.batches(batch.number, 1)
            found = {name: fields[name.encode()].decode() for name in ("state", "digest", "groups", "commits")}
            assert found == {
                "state": batch.state,
                "digest": batch.digest,
                "groups": " ".join(batch.groups),
                "commits": str(batch.commits),
            }
        parts = [(gid, index, parts) for gid in gids for index, parts in self.model.groups[gid].partial.items()]
        saved = await self.ledger.fragments([(gid, index) for gid, index, _ in parts])
        assert saved == [[content(part) for part in ours] for *_, ours in parts]

    async def compare_sets(self) -> None:
        model, prefix = self.model, self.ledger.prefix
        sets = {
            f"{'eval' if evaluation else 'train'}:{state}": model.in_state(state, evaluation=evaluation)
            for evaluation, state in model.sets
        }
        async with self.ledger.redis.pipeline(transaction=False) as pipe:
            for key in (*sets, "leases", "aging"):
                pipe.zrange(f"{prefix}{key}", 0, -1)
            pipe.hgetall(f"{prefix}discarded")
            *found, leases, aging, discarded = await pipe.execute()
        for (key, groups), members in zip(sets.items(), found, strict=True):
            assert [m.decode() for m in members] == [g.gid for g in groups], key
        assert {m.decode() for m in leases} == {g.gid for g in model.leased()}
        assert {m.decode() for m in aging} == {g.gid for g in model.in_state(*IN_PLAY) if g.oldest is not None}
        assert {k.decode(): int(v) for k, v in discarded.items() if int(v)} == +model.discarded

    def compare_run(self, run: dict[str, str]) -> None:
        model = self.model
        names = (
            "issued", "cursor", "sealed", "acked", "run_epoch", "live_epoch", "live_step", "committed_step", "lineage",
            "kept_total", "kept_order", "recent_kept", "recent_decided",
        )  # fmt: skip
        found = {name: int(run.get(name, 0)) for name in names}
        assert found == {name: getattr(model, name) for name in names}
        assert run.get("begun_step") == (None if model.begun_step is None else str(model.begun_step))
        credit = admission_credit(
            self.real.spec.rollout, step=model.step, kept=model.kept_total, in_play=model.in_play(),
            recent_kept=model.recent_kept, recent_decided=model.recent_decided,
        )  # fmt: skip
        assert max(credit, 0) == model.credit()

    def teardown(self) -> None:
        if not hasattr(self, "real"):
            return
        try:
            super().teardown()
            if sys.exc_info()[0] is None:
                self.wait(self.compare(sorted(self.model.groups), self.model.batches))
        finally:
            self.wait(self.ledger.close())


def _compare_group(group: Group, found: records.Group) -> None:
    assert found.state is group.state
    numbers = ("attempts", "failures", "issue")
    assert {n: found.number(n) for n in numbers} == {n: getattr(group, n) for n in numbers}, group.gid
    assert found.number("finished") == len(group.finished)
    assert {i: h.oldest_step for i, h in found.headers().items()} == dict(sorted(group.finished.items()))
    assert found.partial_tokens() == {i: parts[-1].end for i, parts in group.partial.items() if parts}
    texts = ("token", "worker", "done_token", "reason")
    assert {n: found.text(n) for n in texts} == {n: getattr(group, n) for n in texts}, group.gid
    if not group.evaluates:
        assert found.prompt_number == group.prompt
        assert found.number("batch", -1) == group.batch
        assert found.number("oldest", -1) == (-1 if group.oldest is None else group.oldest)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[type[RedisMachine]]:
    (tmp_path / "redis").mkdir()
    redis, loop = RedisServer(tmp_path / "redis", more=VOLATILE), asyncio.new_event_loop()
    yield type("Machine", (RedisMachine,), {"directory": tmp_path, "port": redis.port, "loop": loop})
    loop.close()
    redis.stop()


def play(machine: type[RedisMachine], lived: settings) -> None:
    """A life that fails is printed as it was, and played first the next time: to shrink it would take too long."""
    run_state_machine_as_test(machine, settings=settings(lived, phases=(Phase.reuse, Phase.generate)))


def test_random_lives_leave_redis_as_the_model_says(machine):
    play(machine, lives(20, steps=400))


@pytest.mark.nightly
@pytest.mark.timeout(2 * 3600)
def test_long_random_lives_leave_redis_as_the_model_says(machine, monkeypatch):
    for module in ("stateful", "internal.conjecture.engine"):  # else hypothesis ends a life early
        monkeypatch.setattr(f"hypothesis.{module}.BUFFER_SIZE", 1 << 17)
    play(machine, lives(200, steps=2000))
