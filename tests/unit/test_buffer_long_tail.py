"""Admission and sealing under responses of very different lengths, simulated on the model of the ledger.

An engine with a fixed number of places makes one token a tick for each; a trainer takes a fixed time for a batch. What
is trained must be as long as what was issued, nothing may be too old, and nothing is discarded for its age.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from services.buffer.states import State
from tests.ledger_model import Fragment, LedgerModel, Rules

RULES = Rules(
    num_rollout=150,
    batch_size=32,
    group_size=1,
    over_sampling=32,
    refill="estimate",
    seal_window=0,
    partial_rollout=False,
    max_staleness=0,
    sample_age=0,
    max_attempts=3,
)
PLACES = 64
TRAINING_TICKS = 2_000
MAX_DISTANCE = 0.02


@dataclass
class Response:
    """One group of one sample under way."""

    length: int
    done: int = 0
    began: int = 0
    """Tick at which this lease began."""
    oldest: int = 0
    token: str = ""


class Simulation:
    """A run, tick by tick where something happens."""

    def __init__(self, rules: Rules, seed: int) -> None:
        self.model, self.random = LedgerModel(rules), random.Random(seed)
        self.responses: dict[str, Response] = {}
        self.events: list[tuple[int, str, str]] = []
        self.now = 0
        self.is_training = False
        self.ages: list[int] = []
        self.epoch = self.model.begin_epoch("e", 0, ())
        self.model.record_live(self.epoch, 0, {})

    def run(self) -> None:
        self.lease()
        while self.events:
            self.now, gid, token = heapq.heappop(self.events)
            if not gid:
                self.end_step()
            elif self.responses[gid].token == token:
                self.finish(gid)
            while gids := self.model.next_batch(False):
                self.seal(gids)
            self.train()
            self.model.expire(self.now)
            self.lease()

    def lease(self) -> None:
        room = PLACES - len(self.model.leased())
        request = f"{self.now}.{len(self.responses)}.{room}"
        for gid, token in self.model.lease_work(request, "w", room, request, self.now):
            one = self.responses.setdefault(gid, Response(int(min(32_768, self.random.lognormvariate(6.5, 1.2))) + 1))
            if not one.done:
                one.oldest = self.model.live_step
            one.began, one.token = self.now, token
            self.model.groups[gid].deadline = 1 << 60
            heapq.heappush(self.events, (self.now + one.length - one.done, gid, token))

    def finish(self, gid: str) -> None:
        one = self.responses[gid]
        self.model.submit(gid, one.token, {0: one.oldest})
        self.model.score(gid)
        self.model.settle(gid, "", False)

    def seal(self, gids: list[str]) -> None:
        batch = self.model.sealed
        self.ages += [batch - self.responses[gid].oldest for gid in gids]
        self.model.seal(batch, str(batch), gids)
        for gid in self.model.stops("w"):
            self.interrupt(gid)

    def interrupt(self, gid: str) -> None:
        one = self.responses[gid]
        begin, one.done = one.done, one.done + self.now - one.began
        new = [Fragment(0, begin, one.done, one.oldest, self.model.live_step)] if one.done > begin else []
        self.model.release(gid, one.token, "", new)
        one.token = ""

    def train(self) -> None:
        if not self.is_training and self.model.lease_batch(self.epoch) >= 0:
            self.is_training = True
            heapq.heappush(self.events, (self.now + TRAINING_TICKS, "", ""))

    def end_step(self) -> None:
        batch = self.model.lease_batch(self.epoch)
        self.model.ack(self.epoch, batch, str(batch))
        self.model.record_live(self.epoch, batch + 1, {})
        self.is_training = False

    def distance(self) -> float:
        """Kolmogorov-Smirnov distance of trained lengths to the lengths of all that was issued."""
        trained = [self.responses[g].length for b in self.model.batches for g in b.groups]
        produced = [one.length for one in self.responses.values()]
        at = np.sort(np.array(produced))
        shares = [np.searchsorted(np.sort(np.array(x)), at, side="right") / len(x) for x in (trained, produced)]
        return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_staleness": 1, "sample_age": 1},
        {"max_staleness": 3, "sample_age": 3},
        {"over_sampling": 64, "partial_rollout": True, "sample_age": 2},
        {"over_sampling": 48, "partial_rollout": True, "max_staleness": 2, "sample_age": 4},
        {"over_sampling": 64, "partial_rollout": True, "sample_age": 2, "seal_window": 64},
    ],
    ids=str,
)
def test_long_responses_are_trained_as_often_as_they_come(changes: dict) -> None:
    rules = replace(RULES, **changes)
    simulation = Simulation(rules, seed=1)
    simulation.run()
    assert simulation.model.sealed == rules.num_rollout, "the run ended"
    assert max(simulation.ages) <= rules.sample_age
    assert not simulation.model.in_state(State.STALE)
    assert simulation.distance() <= MAX_DISTANCE
