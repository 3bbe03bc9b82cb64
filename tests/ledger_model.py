"""One run's ledger as a pure model: what the buffer's scripts must do, without Redis, tasks or a clock.

The invariant: every group ever issued is in exactly one state, and is trained once in a lineage. Time in ms, ids and
the tokens of leases come in as arguments. Answers and errors are those of the ledger; a call that is repeated is
answered as it was at first.

    lease_work ─► renew* ─► submit* ─► score ─► settle ─► seal ─► lease_batch ─► ack ─► commit ◄─ rewind
        ▲           │ release, expire                               ▲ begin_epoch │
        └───────────┘                                               └─────────────┘
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from services.buffer.states import IN_PLAY, MOVES, State
from services.common.errors import Aborted, AlreadyExists, FailedPrecondition, NotFound
from tests.ledger_records import Batch, Fragment, Group, Rules

NO_BATCH, RUN_COMPLETE = -1, -2


class LedgerModel:
    """The ledger of one run."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.groups: dict[str, Group] = {}
        self.sets: dict[tuple[bool, State], dict[str, Group]] = {(e, s): {} for e in (False, True) for s in State}
        """Groups by ledger (True for evaluation) and state."""
        self.batches: list[Batch] = []
        self.rewound: list[Batch] = []
        """Committed batches that a rewind took back."""
        self.issued = self.cursor = self.kept_total = self.kept_order = self.recent_kept = self.recent_decided = 0
        self.run_epoch = self.live_epoch = self.acked = self.committed_step = self.lineage = 0
        self.live_step = -1
        self.begun_step: int | None = None
        """Step of the checkpoint that a trainer began from, until it publishes."""
        self.desired_state = "RUNNING"
        self.discarded: Counter[str] = Counter()
        """Response tokens that were thrown away, by reason."""
        self.drained: set[str] = set()
        self.evaluated: set[tuple[int, str]] = set()
        self.requests: dict[str, list[tuple[str, str]]] = {}
        self.epoch_request, self.rewind_request, self.reissued = "", "", 0
        self.touched: set[str] = set()
        """Groups that changed since somebody emptied the set."""

    # ------------------------------------------------------------------------------------------------ admission

    @property
    def sealed(self) -> int:
        """Batches sealed; the number of the next one."""
        return len(self.batches)

    @property
    def step(self) -> int:
        """The step that decides what may start."""
        return self.live_step if self.begun_step is None else min(self.live_step, self.begun_step)

    @property
    def target(self) -> int:
        """Groups that may be kept before the trainer has moved on."""
        rules = self.rules
        return min(self.step + rules.max_staleness + 1, rules.num_rollout) * rules.batch_size

    def in_state(self, *states: State, evaluation: bool = False) -> list[Group]:
        """Groups in some states, in the order of their issue, or of being kept if KEPT."""
        found = [g for state in states for g in self.sets[evaluation, state].values()]
        return sorted(found, key=lambda g: g.kept_order if g.state is State.KEPT else g.issue)

    def in_play(self) -> int:
        """Groups that may still be kept."""
        return sum(len(self.sets[False, state]) for state in IN_PLAY)

    def credit(self) -> int:
        """Fresh groups that may be issued now; with refill `batch`, all of them at once."""
        rules, playing, missing = self.rules, self.in_play(), self.target - self.kept_total
        if rules.refill == "batch":
            return rules.over_sampling if playing < missing else 0
        kept, decided = self.recent_kept + rules.batch_size, self.recent_decided + rules.over_sampling
        bound = min(missing + rules.over_sampling - rules.batch_size, math.ceil(missing * decided / kept))
        return max(bound - playing, 0)

    def is_closed(self) -> bool:
        """True if no training group may be generated: its batch is sealed, or what comes now would be too old."""
        rules, step = self.rules, self.step
        stopped = rules.max_staleness == 0 and self.sealed > step
        return stopped or self.sealed >= rules.num_rollout or step + rules.sample_age < self.sealed

    def is_open(self) -> bool:
        """True if training groups may be handed out."""
        waiting, running = self.sets[True, State.WAITING].values(), self.sets[True, State.GENERATING]
        evaluating = bool(running) or any(g.step == self.live_step for g in waiting)
        if self.live_step < 0 or self.is_closed() or (evaluating and self.rules.max_staleness == 0):
            return False
        return self.sealed <= self.step + self.rules.max_staleness

    # ------------------------------------------------------------------------------------------------ leases

    def lease_work(self, request_id: str, worker: str, room: int, tag: str, now: int) -> list[tuple[str, str]]:
        """Lease groups; `tag` makes the tokens unique. Returns (group, token) pairs."""
        if request_id in self.requests:
            return self.requests[request_id]
        work = self._work(room) if self.desired_state == "RUNNING" and worker not in self.drained else []
        any_weights = self.rules.partial_rollout or self.rules.max_staleness > 0
        for group in work:
            if not any_weights and group.partial_steps - {self.live_step}:
                self._discard(group)
            group.token, group.worker, group.deadline = f"{tag}:{group.gid}", worker, now + self.rules.ttl_ms
            group.attempts += 1
            self._move(group, State.GENERATING)
            group.note_age(self.live_step)
        if work:
            self.requests[request_id] = [(g.gid, g.token) for g in work]
        return self.requests.get(request_id, [])

    def _work(self, room: int) -> list[Group]:
        work = [g for g in self.in_state(State.WAITING, evaluation=True) if g.step == self.live_step]
        if self.is_open():
            waiting, over = self.in_state(State.WAITING), self.rules.over_sampling
            bound = self.target - self.rules.batch_size + over * (2 if self.rules.refill == "batch" else 1)
            allowed = bound - self.kept_total - self.in_play() + len(waiting)
            work += self.in_state(State.PARTIAL) + waiting[: max(allowed, 0)]
            while len(work) < room and (count := self.credit()):
                for _ in range(count if self.rules.refill == "batch" else min(count, room - len(work))):
                    work.append(self._issue(self.cursor))
                    self.cursor += 1
        return work[:room]

    def _issue(self, prompt: int) -> Group:
        self.issued += 1
        return self._add(Group(f"g{self.issued - 1:08d}", self.issued - 1, self.rules.group_size, prompt))

    def _discard(self, group: Group) -> None:
        self.discarded["RESTARTED"] += group.partial_tokens
        group.partial.clear()
        group.partial_steps.clear()
        group.recount_age()

    def too_old(self, group: Group) -> bool:
        """True if the next batch cannot take it."""
        return group.oldest is not None and group.oldest + self.rules.sample_age < self.sealed

    def stop_reason(self, group: Group) -> str:
        """Why a lease must end now; '' if it may go on."""
        if self.desired_state == "STOPPED":
            return "RUN_STOPPED"
        if group.worker in self.drained:
            return "DRAINING"
        if group.evaluates:
            return "VERSION_GONE" if group.step != self.live_step else ""
        if self.is_closed():
            return "SEALED"
        return "TOO_OLD" if self.too_old(group) else ""

    def stops(self, worker: str) -> dict[str, str]:
        """Reasons by group, of the leases of one worker that must end now."""
        leased = [g for g in self.leased() if g.worker == worker]
        return {group.gid: reason for group in leased if (reason := self.stop_reason(group))}

    def leased(self) -> list[Group]:
        """Groups under a lease."""
        return [g for evaluation in (True, False) for g in self.sets[evaluation, State.GENERATING].values()]

    def renew(self, gid: str, token: str, fragments: Sequence[Fragment], now: int) -> str:
        """Extend a lease and save tokens; returns why the lease must end."""
        group = self.groups[gid]
        if group.token != token:
            raise Aborted(f"the lease of {gid} is lost")
        self._save(group, fragments)
        group.deadline = now + self.rules.ttl_ms
        return self.stop_reason(group)

    def submit(self, gid: str, token: str, samples: dict[int, int]) -> bool:
        """Finish samples, given their oldest steps; returns True if the group is complete."""
        group = self.groups[gid]
        if token not in (group.token, group.done_token):
            raise Aborted(f"the lease of {gid} is lost")
        if any(group.finished.get(index, oldest) != oldest for index, oldest in samples.items()):
            raise AlreadyExists(f"a sample of {gid} was submitted with other content")
        if token == group.done_token:
            return True
        for index, oldest in samples.items():
            group.finished[index] = oldest
            group.partial.pop(index, None)
            group.note_age(oldest)
        self.touched.add(gid)
        if len(group.finished) < group.size:
            return False
        group.done_token = token
        group.recount_age()
        self._move(group, State.GENERATED)
        return True

    def release(self, gid: str, token: str, error: str, fragments: Sequence[Fragment]) -> None:
        """Give a lease back; an error counts as a failed attempt."""
        group = self.groups[gid]
        if group.token == token:
            self._save(group, fragments)
            self._end_lease(group, error)

    def lapse(self, gid: str) -> None:
        """The deadline of a lease has passed."""
        self.groups[gid].deadline = -1

    def expire(self, now: int) -> int:
        """Take back lapsed leases, end what is too old to go on; returns how many groups moved."""
        lapsed = [g for g in self.leased() if g.deadline <= now]
        for group in lapsed:
            self._end_lease(group, "the lease expired")
        waiting = self.in_state(State.WAITING, State.GENERATING, evaluation=True)
        gone = [g for g in waiting if g.step < self.live_step]
        for group in gone:
            self._move(group, State.FAILED, "VERSION_GONE")
        old = [g for g in self.in_state(State.PARTIAL, State.WAITING) if self.too_old(g)]
        for group in old:
            self._move(group, State.STALE, "AGE")
        return len(lapsed) + len(gone) + len(old)

    def drain(self, worker: str) -> None:
        """Give a worker no more work."""
        self.drained.add(worker)

    def _save(self, group: Group, fragments: Sequence[Fragment]) -> None:
        self.touched.add(group.gid)
        fragments = [f for f in fragments if f.index not in group.finished]
        for new in fragments:
            parts = group.partial.get(new.index, [])
            if new.begin not in {0, *(f.begin for f in parts), *(f.end for f in parts[-1:])}:
                raise FailedPrecondition(f"progress of {group.gid} begins where no fragment begins or ends")
        for new in fragments:
            parts = group.partial.get(new.index, [])
            group.partial[new.index] = [*(f for f in parts if f.begin < new.begin), new]
            group.partial_steps |= {new.oldest, new.newest}
            group.note_age(new.oldest)

    def _end_lease(self, group: Group, error: str) -> None:
        group.recount_age()
        if error:
            group.failures, group.reason = group.failures + 1, error
        if error and group.failures >= self.rules.max_attempts:
            self._move(group, State.FAILED, error)
        elif self.too_old(group):
            self._move(group, State.STALE, "AGE")
        else:
            self._move(group, State.PARTIAL if group.partial_tokens and not group.evaluates else State.WAITING)

    # ------------------------------------------------------------------------------------------------ grading

    def score(self, gid: str) -> None:
        """GENERATED to SCORED."""
        if self.groups[gid].state is State.GENERATED:
            self._move(self.groups[gid], State.SCORED)

    def settle(self, gid: str, drop_reason: str, keep_when_insufficient: bool) -> str:
        """SCORED to KEPT, or to DROPPED with a reason; returns the state that it is in then, '' if it was elsewhere."""
        group = self.groups[gid]
        if group.state is not State.SCORED:
            return ""
        keep = not drop_reason or (keep_when_insufficient and self.kept_total + self.in_play() <= self.target)
        self.recent_decided, self.recent_kept = self.recent_decided + 1, self.recent_kept + keep
        if not keep:
            self._move(group, State.DROPPED, drop_reason)
        elif self.too_old(group):
            self._move(group, State.STALE, "AGE")
        else:
            self._move(group, State.KEPT)
            self.kept_total += 1
        return group.state

    # ------------------------------------------------------------------------------------------------ batches

    def next_batch(self, waited: bool) -> list[str]:
        """Groups of the next batch, sorted; none if it is not to be sealed yet. `waited`: age_wait_s is over."""
        rules, playing, kept = self.rules, self.in_state(*IN_PLAY), self.in_state(State.KEPT)
        if self.sealed >= rules.num_rollout:
            return []
        if rules.seal_window:
            end = playing[0].issue + rules.seal_window if playing else math.inf
            urgent = self.sealed - rules.sample_age  # too old for the batch after
            kept = sorted((g for g in kept if g.issue < end), key=lambda g: ((g.oldest or 0) > urgent, g.issue))
        else:
            kept.sort(key=lambda g: (g.oldest or 0, g.kept_order))
        chosen = kept[: rules.batch_size]
        if len(chosen) < rules.batch_size or (not waited and self._starves(chosen, playing)):
            return []
        return sorted(g.gid for g in chosen)

    def _starves(self, chosen: Sequence[Group], playing: Sequence[Group]) -> bool:
        """True if a batch of these leaves more groups that some later batch is the last for than there are places,
        and one of these in play would have had a place in this batch."""
        unsealed = [g for g in [*playing, *self.in_state(State.KEPT)] if g.oldest is not None]
        left = {g.gid for g in unsealed} - {g.gid for g in chosen}
        for step in {g.oldest for g in playing if g.oldest is not None}:
            last = max(step + self.rules.sample_age, self.sealed)
            urgent = {g.gid for g in unsealed if (g.oldest or 0) + self.rules.sample_age <= last}
            unavoidable = len(urgent) - self.rules.batch_size
            if len(urgent & left) > max((last - self.sealed) * self.rules.batch_size, unavoidable):
                return True
        return False

    def seal(self, number: int, digest: str, gids: Sequence[str]) -> None:
        """KEPT to READY, as a batch; without effect if the batch is sealed already."""
        if number != self.sealed:
            return
        self.batches.append(Batch(number, digest, list(gids)))
        for gid in gids:
            self.groups[gid].batch = number
            self._move(self.groups[gid], State.READY)
        self.recent_kept, self.recent_decided = self.recent_kept // 2, self.recent_decided // 2
        for group in self.in_state(State.KEPT):
            if self.too_old(group):
                self._move(group, State.STALE, "AGE")
                self.kept_total -= 1

    def lease_batch(self, epoch: int) -> int:
        """The oldest batch that is not acknowledged, or why there is none."""
        self._check_epoch(epoch)
        if self.acked >= self.rules.num_rollout:
            return RUN_COMPLETE
        if self.acked >= self.sealed:
            return NO_BATCH
        self._move_batch(self.batches[self.acked], State.IN_TRAINING)
        return self.acked

    def ack(self, epoch: int, number: int, digest: str) -> None:
        """IN_TRAINING to TRAINED."""
        self._check_epoch(epoch)
        if number >= self.sealed:
            raise NotFound(f"batch {number} is not sealed")
        batch = self.batches[number]
        if batch.digest != digest or batch.state is State.READY:
            raise FailedPrecondition(f"batch {number} has another digest, or is not leased")
        if batch.state is State.IN_TRAINING:
            self._move_batch(batch, State.TRAINED)
            self.acked = number + 1

    def commit(self, epoch: int, step: int) -> None:
        """Every batch below `step` to COMMITTED."""
        self._check_epoch(epoch)
        if step > self.acked:
            raise FailedPrecondition(f"step {step} has batches that were not acknowledged")
        self._commit(step)

    def begin_epoch(self, request_id: str, step: int, digests: Sequence[str]) -> int:
        """Open a new epoch from a checkpoint; batches that it does not contain return to READY."""
        if request_id == self.epoch_request:
            return self.run_epoch
        if step < self.committed_step or [b.digest for b in self.batches[:step]] != list(digests):
            raise FailedPrecondition("the checkpoint is older than the committed step, or of another run")
        self._commit(step)
        for batch in self.batches[step:]:
            self._move_batch(batch, State.READY)
        self.acked, self.begun_step, self.epoch_request = step, step, request_id
        self.run_epoch += 1
        return self.run_epoch

    def record_live(self, epoch: int, step: int, evaluations: dict[str, int]) -> None:
        """A version is served; issues the evaluations (sizes by name) that are due, once a step."""
        self._check_epoch(epoch)
        if epoch == self.live_epoch and step < self.live_step:
            raise FailedPrecondition(f"step {self.live_step} of this epoch is live already")
        self.live_epoch, self.live_step, self.begun_step = epoch, step, None
        for name in [name for name in evaluations if (step, name) not in self.evaluated]:
            self.evaluated.add((step, name))
            for index in range(evaluations[name]):
                issue = sum(g.evaluates for g in self.groups.values()) + 1
                self._add(Group(f"e{step:06d}-{name}-{index:05d}", issue, 1, step=step))

    def rewind(self, request_id: str, step: int) -> tuple[int, int]:
        """Go back below the committed step; returns the lineage and how many prompts were issued again."""
        if request_id == self.rewind_request:
            return self.lineage, self.reissued
        if step >= self.committed_step:
            raise FailedPrecondition(f"step {step} is not below the committed step {self.committed_step}")
        taken, undone = self.batches[step : self.committed_step], self.batches[self.committed_step :]
        for gid in [gid for batch in undone for gid in batch.groups]:
            self.groups[gid].batch = -1
            self._move(self.groups[gid], State.KEPT)
        again = [self._issue(self.groups[gid].prompt) for batch in taken for gid in batch.groups]
        self.batches, self.rewound = self.batches[:step], self.rewound + taken
        self.acked = self.committed_step = self.begun_step = step
        self.live_step = -1
        self.kept_total, self.reissued = self.kept_total - len(again), len(again)
        self.lineage, self.run_epoch, self.rewind_request = self.lineage + 1, self.run_epoch + 1, request_id
        return self.lineage, self.reissued

    def set_desired_state(self, state: str) -> None:
        """RUNNING, PAUSED or STOPPED, which is final."""
        if self.desired_state == "STOPPED" != state:
            raise FailedPrecondition("the run is STOPPED")
        self.desired_state = state

    # ------------------------------------------------------------------------------------------------ moves

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.run_epoch:
            raise Aborted(f"run_epoch {epoch} is not the current epoch {self.run_epoch}")

    def _commit(self, step: int) -> None:
        for batch in self.batches[self.committed_step : step]:
            self._move_batch(batch, State.COMMITTED)
            batch.commits += 1
        self.committed_step = max(self.committed_step, step)

    def _move_batch(self, batch: Batch, to: State) -> None:
        for gid in batch.groups if batch.state is not to else ():
            self._move(self.groups[gid], to)
        batch.state = to

    def _add(self, group: Group) -> Group:
        self.groups[group.gid] = self.sets[group.evaluates, group.state][group.gid] = group
        self.touched.add(group.gid)
        return group

    def _move(self, group: Group, to: State, reason: str = "") -> None:
        assert to in MOVES[group.state], f"{group.gid} goes from {group.state} to {to}"
        del self.sets[group.evaluates, group.state][group.gid]
        self.sets[group.evaluates, to][group.gid] = group
        if to is State.KEPT:
            self.kept_order += 1
            group.kept_order = self.kept_order
        if to is not State.GENERATING:
            group.token = ""
        if to in (State.STALE, State.FAILED):
            self.discarded[to] += group.tokens
        group.state, group.reason = to, reason or group.reason
        self.touched.add(group.gid)
