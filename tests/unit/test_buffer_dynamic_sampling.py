"""Dynamic sampling step by step: groups complete in a scripted order on the real scripts and the real filters.

Redis does not write to disk here. Gateway, grader and sealer are played by the test; an oracle plays slime's loop,
which with refill `batch` the ledger follows up to the seal.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from pydantic import ValidationError

from services.buffer.filters import SampledGroup, SampledSample, decide, load_filter
from services.buffer.hooks import HookFailed
from services.buffer.states import State
from tests.ledger_on_redis import VOLATILE, LedgerOnRedis, finished
from tests.ledger_records import Rules
from tests.redis_server import RedisServer

SPREAD, SAME = (0.0, 1.0), (1.0, 1.0)
RULES = Rules(
    num_rollout=3,
    batch_size=2,
    group_size=2,
    over_sampling=3,
    refill="batch",
    seal_window=0,
    partial_rollout=False,
    max_staleness=0,
    sample_age=1,
    max_attempts=2,
)


class Sampler:
    """A run whose first weights are live, and everybody who works on it."""

    def __init__(self, real: LedgerOnRedis, group_filter: str) -> None:
        self.ledger, self.filter = real.ledger, load_filter(group_filter)
        self.tokens: dict[int, str] = {}
        """Leases by issue number."""
        self.requests = itertools.count()

    async def begin(self) -> None:
        await self.ledger.redis.flushall()
        await self.ledger.register("digest")
        await self.publish(await self.ledger.begin_epoch("begin", 0, "", []), 0)

    async def publish(self, epoch: int, step: int) -> None:
        await self.ledger.record_version(epoch, step, "LIVE", b"", {})

    async def lease(self) -> list[int]:
        """Lease whatever there is; returns the issue numbers."""
        leases = await self.ledger.lease_work(f"{next(self.requests)}", "w", 100) or []
        numbers = [int(group_id[1:]) for group_id, _ in leases]
        self.tokens |= dict(zip(numbers, (token for _, token in leases), strict=True))
        return numbers

    async def complete(self, number: int, *rewards: float | None) -> str:
        """Generate, grade and filter a group; returns the state that it ends in."""
        group_id = f"g{number:08d}"
        samples = [finished(group_id, index, 0) for index in range(len(rewards))]
        await self.ledger.submit(group_id, self.tokens.pop(number), len(rewards), samples)
        await self.ledger.score(group_id, [r or 0.0 for r in rewards], ["SCORED:CORRECT"] * len(rewards))
        try:
            keep, reason = await decide(self.filter, sampled(group_id, *rewards))
        except HookFailed as error:
            await self.ledger.fail_group(group_id, State.SCORED, "FILTER", str(error))
        else:
            await self.ledger.settle(
                group_id, keep, reason, [r or 0.0 for r in rewards],
                keep_when_insufficient=self.filter.keep_when_insufficient,
            )  # fmt: skip
        return (await self.ledger.groups([group_id]))[0].state

    async def kept(self) -> list[int]:
        return [int(group_id[1:]) for group_id in await self.ledger.group_ids("train", State.KEPT)]


def sampled(group_id: str, *rewards: float | None) -> SampledGroup:
    samples = [
        SampledSample(index, "", 2, reward, "SCORED", "CORRECT", False, 0)  # pyright: ignore[reportArgumentType]
        for index, reward in enumerate(rewards)
    ]
    return SampledGroup(group_id, "", "42", tuple(samples))


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"), more=VOLATILE)
    yield server
    server.stop()


@pytest.fixture
async def sampler(request, redis, tmp_path) -> AsyncIterator[Sampler]:
    """Parameter: the filter, and the rules that differ."""
    group_filter, changes = getattr(request, "param", ("nonzero_std", {}))
    one = Sampler(LedgerOnRedis(tmp_path, redis.port, replace(RULES, **changes)), group_filter)
    await one.begin()
    yield one
    await one.ledger.close()


def a_run(group_filter: str = "nonzero_std", **changes):
    return pytest.mark.parametrize("sampler", [(group_filter, changes)], indirect=True)


# ---------------------------------------------------------------------------------------------------- refill


async def test_a_whole_batch_is_issued_when_too_few_can_be_kept(sampler):
    assert await sampler.lease() == [0, 1, 2], "an over-sampling batch at first"
    assert await sampler.complete(1, *SAME) == State.DROPPED
    assert await sampler.lease() == [], "two can still be kept"
    assert await sampler.complete(0, *SAME) == State.DROPPED
    assert await sampler.lease() == [3, 4, 5], "one is missing, three are issued"
    assert await sampler.complete(4, *SPREAD) == State.KEPT
    assert await sampler.complete(2, *SPREAD) == State.KEPT
    assert await sampler.kept() == [4, 2], "in the order of completion"
    assert await sampler.lease() == []
    assert (await sampler.ledger.stats()).dropped == {"zero_std_1.0": 2}


@a_run(refill="estimate")
async def test_the_estimate_issues_what_the_keep_rate_says_is_missing(sampler):
    assert await sampler.lease() == [0, 1, 2], "before any is graded, over_sampling are expected to give a batch"
    assert await sampler.complete(1, *SAME) == State.DROPPED
    assert await sampler.lease() == [3], "of 4 groups 2 are kept: 4 are needed, but 3 may be out"
    assert await sampler.complete(0, *SPREAD) == State.KEPT
    assert await sampler.lease() == [], "of 5 groups 3 are kept: 2 are needed for the one that is missing"
    assert await sampler.complete(2, *SAME) == State.DROPPED
    assert await sampler.lease() == [4]
    assert await sampler.complete(3, *SPREAD) == State.KEPT
    assert await sampler.lease() == [], "nothing is missing"


async def test_a_surplus_is_kept_for_the_next_batch(sampler):
    await sampler.lease()
    for number in (2, 0, 1):
        assert await sampler.complete(number, *SPREAD) == State.KEPT
    await sampler.ledger.seal(0, "digest", b"", ["g00000000", "g00000002"])
    assert await sampler.kept() == [1], "neither lost nor trained yet"
    assert await sampler.lease() == [], "nothing starts between a seal and the next weights"
    await sampler.publish(1, 1)
    assert await sampler.lease() == [3, 4, 5], "1 kept of 2: too few, so a whole batch"


@a_run(over_sampling=2, sample_age=1)
async def test_a_group_that_fails_does_not_stall_its_batch(sampler):
    assert await sampler.lease() == [0, 1]
    assert await sampler.complete(0, *SPREAD) == State.KEPT
    await sampler.ledger.release("g00000001", sampler.tokens.pop(1), "the engine is broken")
    assert await sampler.lease() == [1]
    await sampler.ledger.release("g00000001", sampler.tokens.pop(1), "the engine is broken")
    assert await sampler.lease() == [2, 3], "after two attempts its place is free"
    assert (await sampler.ledger.stats()).failed == {"MAX_ATTEMPTS": 1}


# ---------------------------------------------------------------------------------------------------- fallback


@a_run("nonzero_std_with_fallback")
async def test_the_fallback_keeps_what_is_needed_from_remaining_equal_to_target_on(sampler):
    await sampler.lease()
    assert await sampler.complete(0, *SAME) == State.DROPPED, "remaining 3 > target 2"
    assert await sampler.complete(1, *SAME) == State.KEPT, "remaining 2 = target 2"
    assert await sampler.lease() == [], "no other round"
    assert await sampler.complete(2, *SAME) == State.KEPT


@a_run("nonzero_std_with_fallback")
async def test_without_need_the_fallback_drops_as_the_plain_filter_does(sampler):
    await sampler.lease()
    assert await sampler.complete(0, *SPREAD) == State.KEPT
    assert await sampler.complete(1, *SPREAD) == State.KEPT
    assert await sampler.complete(2, *SAME) == State.DROPPED, "remaining counts what is kept: 3 > target 2"


# ---------------------------------------------------------------------------------------------------- rewards


@pytest.mark.parametrize(
    ("rewards", "state"),
    [
        ((0.1 + 0.2, 0.3), State.DROPPED),  # std 3.9e-17
        ((1e8, 1e8 + 1e-7), State.DROPPED),  # std 7.4e-8
        ((1e8, 1e8 + 1e-5), State.KEPT),  # std 7e-6; in float32 both are 1e8
        ((0.0, 2e-6), State.KEPT),  # std 1.41e-6
        ((0.0, 1.4e-6), State.DROPPED),  # unbiased std 0.99e-6
        ((-1.0, -1.0), State.DROPPED),
    ],
)
async def test_rewards_are_compared_in_float64(sampler, rewards, state):
    await sampler.lease()
    assert await sampler.complete(0, *rewards) == state


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_costs_its_group_and_nothing_else(sampler, reward):
    await sampler.lease()
    assert await sampler.complete(0, 1.0, reward) == State.FAILED
    (group,) = await sampler.ledger.groups(["g00000000"])
    assert f"the reward of sample 1 of group g00000000 is {reward}" in group.text("reason")
    assert (await sampler.ledger.stats()).failed == {"FILTER": 1}
    assert await sampler.complete(1, *SAME) == State.DROPPED
    assert await sampler.lease() == [3, 4, 5], "its place is free"


def test_groups_of_one_are_refused(tmp_path):
    with pytest.raises(ValidationError, match="n_samples_per_prompt"):
        LedgerOnRedis(tmp_path, 1, replace(RULES, group_size=1))


# ---------------------------------------------------------------------------------------------------- the oracle


class Slime:
    """slime's loop for one batch: `remaining` counts the groups that can still be kept, or are."""

    def __init__(self, target: int, over: int, fallback: bool) -> None:
        self.target, self.over, self.fallback = target, over, fallback
        self.submitted = self.remaining = 0
        self.kept: list[int] = []

    def fetch(self) -> None:
        while self.remaining < self.target:
            self.submitted += self.over
            self.remaining += self.over

    def done(self, number: int, spread: bool) -> None:
        if spread or (self.fallback and self.remaining <= self.target):
            self.kept.append(number)
        else:
            self.remaining -= 1


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "sampler",
    [(name, {}) for name in ("nonzero_std", "nonzero_std_with_fallback")],
    indirect=True,
    ids=["", "fallback"],
)
async def test_up_to_the_seal_the_ledger_does_what_slime_does(sampler, seed):
    chance = random.Random(seed)
    slime = Slime(RULES.batch_size, RULES.over_sampling, sampler.filter.keep_when_insufficient)
    while len(slime.kept) < slime.target:
        slime.fetch()
        await sampler.lease()
        assert (await sampler.ledger.stats()).number("issued") == slime.submitted
        number, spread = chance.choice(sorted(sampler.tokens)), chance.random() < 0.3
        await sampler.complete(number, *(SPREAD if spread else SAME))
        slime.done(number, spread)
        assert await sampler.kept() == slime.kept
    assert await sampler.lease() == []
