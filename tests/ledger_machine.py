"""Random lives of a run for hypothesis: gateways, graders and a trainer that come, stall, crash and repeat themselves.

The machine plays on the model alone, or on the model and a real ledger at once (a subclass overrides `call`). They do
what the contracts allow: calls are late, repeated, or made with the lease of another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.buffer.states import State
from services.common.errors import FlotillaError
from services.common.spec import RolloutSpec
from tests.ledger_laws import LAWS, within_age
from tests.ledger_model import NO_BATCH, LedgerModel
from tests.ledger_records import Fragment, Group, Rules

BATCH = 2
FAIR_BATCHES = 8
"""How far a life that is over must still be able to go."""
PICK = st.integers(0, 63)
"""Which one of several, modulo how many there are: small numbers keep long examples within hypothesis' limits."""
COIN = st.booleans()


def make_rules(
    num_rollout: int,
    surplus: int,
    refill: str,
    window: int,
    partial: bool,
    staleness: int,
    tight: bool,
    attempts: int,
) -> Rules:
    """Rules of a run whose max_sample_age is the default, or the least that the spec allows."""
    spec = RolloutSpec.model_validate(
        {
            "num_rollout": num_rollout,
            "rollout_batch_size": BATCH,
            "n_samples_per_prompt": 2,
            "over_sampling_batch_size": BATCH + surplus,
            "refill": refill,
            "partial_rollout": partial,
            "max_staleness": staleness,
        }
    )
    return Rules(
        num_rollout=num_rollout,
        batch_size=BATCH,
        group_size=2,
        over_sampling=spec.over_sampling,
        refill=refill,
        seal_window=window,
        partial_rollout=partial,
        max_staleness=staleness,
        sample_age=spec.least_sample_age if tight else spec.sample_age,
        max_attempts=attempts,
    )


RULES = st.builds(
    make_rules,
    num_rollout=st.sampled_from([200, 20, 4]),
    surplus=st.sampled_from([0, 1, 3]),
    refill=st.sampled_from(["estimate", "batch"]),
    window=st.sampled_from([0, 1, 4]),
    partial=COIN,
    staleness=st.sampled_from([0, 1, 3]),
    tight=COIN,
    attempts=st.sampled_from([2, 4]),
)


ACTS = {
    "lease": 12, "submit": 14, "renew": 6, "renew_with_a_gap": 1, "release": 3, "obey": 4, "lapse": 1, "drain": 1,
    "repeat": 4, "score": 10, "settle": 10, "seal": 12, "train": 18, "save": 3, "crash": 2, "rewind": 1, "pause": 1,
}  # fmt: skip
"""How often what happens. One rule plays them all: with a rule for each, hypothesis would leave most of them out of
most examples, and no batch would ever be sealed."""


def lives(count: int, steps: int) -> settings:
    """So many lives, independent of one another: by default most would be mutations of a few."""
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        backend="hypothesis-urandom",
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example),
    )


class LedgerMachine(RuleBasedStateMachine):
    """Plays one run."""

    @initialize(rules=RULES, evaluates=COIN, ends=st.sampled_from(["finish", "finish", "stop"]))
    def begin(self, rules: Rules, evaluates: bool, ends: str) -> None:
        self.model, self.evaluates, self.ends = LedgerModel(rules), evaluates, ends
        self.workers = ["a", "b"]
        self.now = self.ids = 0
        self.leases: list[tuple[str, str]] = []
        """Every lease given, the lost ones too."""
        self.last: Callable[[], Any] = lambda: None
        """The last call, to repeat it."""
        self.epoch, self.committed = 0, (0, 0)
        self.trained: list[str] = []
        """Digests of the batches in the trainer's weights."""
        self.saved: list[str] = []
        """The same, in its last checkpoint."""
        self.content: dict[tuple[int, int], str] = {}
        """Digest by lineage and batch."""
        self.leased, self.digest, self.published = NO_BATCH, "", True
        self.open()
        self.start_trainer()

    def open(self) -> None:
        """For a subclass: there is a new run."""

    def call(self, name: str, *args: Any) -> Any:
        """Make a call; returns the answer, or the name of the error."""
        try:
            return getattr(self.model, name)(*args)
        except FlotillaError as error:
            return type(error).__name__

    def remember(self, name: str, *args: Any) -> Any:
        """Make a call that may be repeated later."""
        self.last = lambda: self.call(name, *args)
        return self.last()

    def new_id(self) -> str:
        """An id that was not used before."""
        self.ids += 1
        return f"id{self.ids}"

    @rule(what=st.sampled_from([act for act, weight in ACTS.items() for _ in range(weight)]), pick=PICK, more=PICK)
    def act(self, what: str, pick: int, more: int) -> None:
        """One thing happens; the numbers say to what, and how."""
        getattr(self, what)(pick, more)

    # ------------------------------------------------------------------------------------------------ gateways

    def lease(self, pick: int, more: int) -> None:
        if more % 8:
            self.call("set_desired_state", "RUNNING")
        worker, room = pick % 2, 1 + pick // 2 % 4
        model, issued, request, tag = self.model, self.model.issued, self.new_id(), self.new_id()
        held = {g.gid for g in model.leased()}
        leases = self.remember("lease_work", request, self.workers[worker], room, tag, self.now)
        assert not held & {gid for gid, _ in leases}, "a group is leased twice"
        self.leases += leases
        if model.issued > issued and model.rules.refill == "estimate":
            surplus = model.rules.over_sampling - model.rules.batch_size
            assert model.kept_total + model.in_play() <= model.target + surplus, "the bound of admission"

    def pick_lease(self, pick: int) -> tuple[str, str]:
        """Mostly a lease that is held; else a lost one, or none."""
        held = [(g.gid, g.token) for g in self.model.leased()]
        known = held if held and pick % 4 else self.leases[-8:]
        return known[pick // 4 % len(known)] if known else ("", "")

    def progress(self, group: Group, pick: int) -> list[Fragment]:
        """What a gateway could send: tokens after those saved, or instead of some, or too late."""
        out = []
        for index in range(group.size):
            parts = group.partial.get(index, [])
            begins = [0, *(f.begin for f in parts), *(f.end for f in parts)]
            begin = begins[-1 - (pick % 3 == 0) * (pick // 3 % len(begins))]
            step = max(self.model.live_step - (pick % 5 == 0), 0)
            if (index not in group.finished or pick % 8 == 7) and (pick + index) % 4:
                out.append(Fragment(index, begin, begin + 1 + pick % 7, step, max(self.model.live_step, step)))
        return out

    def renew(self, pick: int, more: int) -> None:
        gid, token = self.pick_lease(pick)
        if gid:
            self.remember("renew", gid, token, self.progress(self.model.groups[gid], more), self.now)

    def renew_with_a_gap(self, pick: int, more: int) -> None:
        gid, token = self.pick_lease(pick)
        if gid and (index := pick % 2) not in self.model.groups[gid].finished:
            gap = Fragment(index, 1000, 1001, 0, 0)
            fragments = [*self.progress(self.model.groups[gid], more)[:1], gap]
            assert self.call("renew", gid, token, fragments, self.now) in ("FailedPrecondition", "Aborted")

    def submit(self, pick: int, more: int) -> None:
        which, again = [[0, 1], [0, 1], [0], [1]][more % 4], more % 8 == 0
        leases = [self.pick_lease(pick)] if pick % 2 else [(g.gid, g.token) for g in self.model.leased()]
        for gid, token in leases:
            if gid:
                group = self.model.groups[gid]
                self.submit_samples(group, token, [i for i in which if i not in group.finished or again])

    def submit_samples(self, group: Group, token: str, indices: list[int]) -> None:
        """Finish samples under the live weights."""
        samples = {}
        for index in indices:
            if index < group.size:
                begun = [f.oldest for f in group.partial.get(index, [])]
                samples[index] = min([*begun, max(self.model.live_step, 0)])
        if samples:
            self.remember("submit", group.gid, token, samples)

    def release(self, pick: int, more: int) -> None:
        gid, token = self.pick_lease(pick)
        if gid:
            error = "broken" if pick % 3 == 0 else ""
            self.remember("release", gid, token, error, self.progress(self.model.groups[gid], more))

    def obey(self, pick: int, more: int) -> None:
        """A gateway asks which of its leases must stop, and releases them."""
        for gid in self.call("stops", self.workers[pick % 2]):
            group = self.model.groups[gid]
            self.call("release", gid, group.token, "", self.progress(group, pick))

    def lapse(self, pick: int, more: int) -> None:
        held = [g.gid for g in self.model.leased()]
        if held and more % 2:
            self.call("lapse", held[pick % len(held)])
        self.call("expire", self.now)

    def drain(self, pick: int, more: int) -> None:
        """A gateway is taken away; another one takes its place."""
        worker = pick % 2
        self.call("drain", self.workers[worker])
        assert self.call("lease_work", self.new_id(), self.workers[worker], 4, self.new_id(), self.now) == []
        self.call("stops", self.workers[worker])
        self.workers[worker] = self.new_id()

    def repeat(self, pick: int, more: int) -> None:
        """The answer was lost, or the call comes twice."""
        self.last()

    # ------------------------------------------------------------------------------------------------ grading, sealing

    def score(self, pick: int, more: int) -> None:
        if ready := self.model.in_state(State.GENERATED) + self.model.in_state(State.GENERATED, evaluation=True):
            for group in ready[pick % len(ready) :]:
                self.remember("score", group.gid)

    def settle(self, pick: int, more: int) -> None:
        if ready := self.model.in_state(State.SCORED):
            for number, group in enumerate(ready[pick % len(ready) :]):
                drop_reason = "zero_std_0.0" if (more + number) % 4 == 0 else ""
                self.remember("settle", group.gid, drop_reason, more % 8 == 0)

    def next_batch(self, waited: bool) -> list[str]:
        """Groups to be sealed now."""
        return self.model.next_batch(waited)

    def seal(self, pick: int, more: int) -> None:
        model, number = self.model, self.model.sealed
        gids = self.next_batch(waited=pick % 4 == 0)
        if gids:
            digest = self.content[model.lineage, number] = f"{model.lineage}:{number}:{' '.join(gids)}"
            self.remember("seal", number, digest, gids)
            within_age(model, [number])

    # ------------------------------------------------------------------------------------------------ the trainer

    def start_trainer(self) -> None:
        """It starts from its last checkpoint and publishes those weights."""
        self.trained, self.leased = list(self.saved), NO_BATCH
        self.epoch = self.remember("begin_epoch", self.new_id(), len(self.saved), list(self.saved))
        assert self.epoch == self.model.run_epoch
        self.publish()

    def publish(self) -> None:
        """The weights that the trainer has are served."""
        step = len(self.trained)
        due = {"held-out": 2} if self.evaluates and step % 3 == 0 else {}
        self.published = True
        self.remember("record_live", self.epoch, step, due)

    def train(self, pick: int, more: int) -> None:
        """What the trainer does next; it may publish later than it could."""
        if not self.published and more % 4:
            self.publish()
        elif self.leased < 0:
            answer = self.remember("lease_batch", self.epoch)
            if answer == "Aborted":  # fenced by a rewind
                self.start_trainer()
            elif answer != NO_BATCH:
                self.leased = answer
                self.digest = self.model.batches[answer].digest if answer >= 0 else ""
        else:
            self.acknowledge()

    def acknowledge(self) -> None:
        """The optimizer steps of a batch are done."""
        number, self.leased = self.leased, NO_BATCH
        if self.remember("ack", self.epoch, number, self.digest) is None:
            assert number == len(self.trained), "batches come in order, none twice, none left out"
            assert self.digest == self.content[self.model.lineage, number], "a batch has another content than before"
            self.trained.append(self.digest)
            self.published = False

    def save(self, pick: int, more: int) -> None:
        """A checkpoint, and mostly its commit. Whoever rewinds a run stops its trainer."""
        if self.epoch == self.model.run_epoch:
            self.saved = list(self.trained)
        if more % 4:
            self.remember("commit", self.epoch, len(self.saved))

    def crash(self, pick: int, more: int) -> None:
        """A new trainer starts; the old one is fenced, and no foreign checkpoint is taken."""
        old = self.epoch
        self.start_trainer()
        calls: dict[str, tuple[Any, ...]] = {"lease_batch": (), "commit": (0,), "ack": (0, ""), "record_live": (0, {})}
        for name, args in calls.items():
            assert self.call(name, old, *args) == "Aborted"
        if self.saved:
            foreign = ["?"] * len(self.saved)
            assert self.call("begin_epoch", self.new_id(), len(foreign), foreign) == "FailedPrecondition"

    def rewind(self, pick: int, more: int) -> None:
        if more % 2:
            return
        step = pick % (self.model.committed_step + 1)
        if self.model.committed_step > step:
            self.saved = self.saved[:step]
        self.remember("rewind", self.new_id(), step)

    def pause(self, pick: int, more: int) -> None:
        self.call("set_desired_state", "PAUSED")

    # ------------------------------------------------------------------------------------------------ what holds

    @invariant()
    def holds(self) -> None:
        model = self.model
        for law in LAWS:
            law(model)
        lineage, committed = self.committed
        assert model.committed_step >= committed or model.lineage > lineage, "the committed step went back"
        self.committed = (model.lineage, model.committed_step)

    def teardown(self) -> None:
        if hasattr(self, "model") and sys.exc_info()[0] is None:  # else the life has ended with an error
            self.finish() if self.ends == "finish" else self.stop()

    def stop(self) -> None:
        """Nothing is handed out in a run that was stopped, what is leased must end, and it stays so."""
        self.call("set_desired_state", "STOPPED")
        for worker in {g.worker for g in self.model.leased()}:
            assert set(self.call("stops", worker).values()) == {"RUN_STOPPED"}
        assert self.call("lease_work", self.new_id(), "late", 4, self.new_id(), self.now) == []
        assert self.call("set_desired_state", "RUNNING") == "FailedPrecondition"

    def finish(self) -> None:
        """From any state, a fair schedule trains the next batches, or ends the run."""
        self.call("set_desired_state", "RUNNING")
        for group in self.model.leased():
            self.call("lapse", group.gid)
        self.call("expire", self.now)
        goal = min(self.model.sealed + FAIR_BATCHES, self.model.rules.num_rollout)
        for _ in range(2 * FAIR_BATCHES + 10):
            self.generate_all()
            self.train_all()
            if len(self.trained) >= goal:
                return
        raise AssertionError("the run does not go on")

    def generate_all(self) -> None:
        """Lease everything, submit everything, keep everything, seal everything."""
        for gid, token in self.call("lease_work", self.new_id(), "fair", 1000, self.new_id(), self.now):
            group = self.model.groups[gid]
            self.submit_samples(group, token, [i for i in range(group.size) if i not in group.finished])
        for group in self.model.in_state(State.GENERATED) + self.model.in_state(State.GENERATED, evaluation=True):
            self.call("score", group.gid)
        for group in self.model.in_state(State.SCORED):
            self.call("settle", group.gid, "", False)
        while self.next_batch(waited=True):
            self.seal(0, 0)

    def train_all(self) -> None:
        """Train on everything that is sealed."""
        self.train(0, 1)
        while self.leased >= 0 or not self.published:
            self.train(0, 1)
