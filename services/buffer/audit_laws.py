"""The laws of the ledger over one instant of its sets, counters and batches. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise

from services.buffer.audit_snapshot import LEDGERS, Batch, Snapshot
from services.buffer.states import IN_PLAY, TERMINAL, State

SEALED = (State.READY, State.IN_TRAINING, State.TRAINED, State.COMMITTED)
"""States of the groups of a batch."""


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """Something in the ledger that contradicts the rest of it."""

    subject: str
    """The group, batch or key."""
    problem: str


def snapshot_laws(snapshot: Snapshot) -> list[Discrepancy]:
    """Everything that one instant must obey."""
    laws = (_conservation, _membership, _order, _totals, _reasons, _leases, _aging, _retained, _progress, _batches)
    return list(chain.from_iterable(law(snapshot) for law in laws))


def is_over(group_id: str, state: State) -> bool:
    """True if nothing will happen to a group any more, so that its content need not stay."""
    return state in TERMINAL or (group_id.startswith("e") and state is State.SCORED)


def _conservation(s: Snapshot) -> Iterator[Discrepancy]:
    for ledger, counter in LEDGERS.items():
        surplus = sum(map(len, s.sets[ledger].values())) - s.number(counter)
        if surplus:
            yield Discrepancy(f"{ledger}:*", f"the states hold {_difference(surplus)} than {counter} says")
    if surplus := sum(map(len, s.evaluations.values())) - s.number("eval_issued"):
        yield Discrepancy("evaluation:*", f"the evaluations hold {_difference(surplus)} than eval_issued says")


def _membership(s: Snapshot) -> Iterator[Discrepancy]:
    issued = {
        "train": {f"g{number:08d}" for number in range(s.number("issued"))},
        "eval": {group_id for groups in s.evaluations.values() for group_id in groups},
    }
    for ledger, states in s.sets.items():
        seen: dict[str, State] = {}
        for state, groups in states.items():
            for group_id in groups:
                if group_id in seen:
                    yield Discrepancy(group_id, f"is in {seen[group_id]} and in {state}")
                elif group_id not in issued[ledger]:
                    yield Discrepancy(group_id, f"is in {ledger}:{state} but was never issued")
                seen[group_id] = state
        for group_id in sorted(issued[ledger] - seen.keys()):
            yield Discrepancy(group_id, "was issued but is in no state")


def _order(s: Snapshot) -> Iterator[Discrepancy]:
    for state in set(State) - TERMINAL - {State.KEPT}:
        for group_id, order in s.sets["train"][state].items():
            if group_id != f"g{order:08d}":
                yield Discrepancy(group_id, f"stands at {order} in train:{state}")


def _totals(s: Snapshot) -> Iterator[Discrepancy]:
    taken_back = sum(len(batch.groups) for batch in s.batches if batch.is_taken_back)
    held = sum(len(s.sets["train"][state]) for state in (State.KEPT, *SEALED)) - taken_back
    if surplus := s.number("kept_total") - held:
        yield Discrepancy("run", f"kept_total counts {_difference(surplus)} than the states hold")
    if surplus := s.number("issued") - s.number("cursor") - taken_back:
        yield Discrepancy("run", f"issued counts {_difference(surplus)} than the prompts taken and those of rewinds")


def _reasons(s: Snapshot) -> Iterator[Discrepancy]:
    for (ledger, state), counted in s.reasons.items():
        if surplus := counted - len(s.sets[ledger][state]):
            name = f"{ledger}:{state.lower()}_reasons"
            yield Discrepancy(name, f"counts {_difference(surplus)} than {ledger}:{state} holds")


def _leases(s: Snapshot) -> Iterator[Discrepancy]:
    generating = {group_id for states in s.sets.values() for group_id in states[State.GENERATING]}
    for group_id in sorted(s.ordered["leases"].keys() - generating):
        yield Discrepancy(group_id, "has a lease but is not GENERATING")
    for group_id in sorted(generating - s.ordered["leases"].keys()):
        yield Discrepancy(group_id, "is GENERATING without a lease, so nobody will take it back")


def _aging(s: Snapshot) -> Iterator[Discrepancy]:
    in_play = {group_id for state in IN_PLAY for group_id in s.sets["train"][state]}
    for group_id in sorted(s.ordered["aging"].keys() - in_play):
        yield Discrepancy(group_id, "is in aging but not in play")


def _retained(s: Snapshot) -> Iterator[Discrepancy]:
    for group_id in s.ordered["retained"]:
        state = s.state_of.get(group_id)
        if state is None or not is_over(group_id, state):
            yield Discrepancy(group_id, f"is in retained, though it is {state or 'in no state'}")


def _progress(s: Snapshot) -> Iterator[Discrepancy]:
    names = ("committed_step", "acked", "sealed", "num_rollout")
    for low, high in pairwise(names):
        if s.number(low) > s.number(high):
            yield Discrepancy("run", f"{low} is {s.number(low)}, {high} only {s.number(high)}")


def _batches(s: Snapshot) -> Iterator[Discrepancy]:
    owners: dict[str, Batch] = {}
    for batch in s.batches:
        yield from _batch(s, batch)
        for group_id in batch.groups:
            if group_id in owners:
                yield Discrepancy(group_id, f"is in batch {owners[group_id].name} and in batch {batch.name}")
            owners[group_id] = batch
    for state in SEALED:
        for group_id in s.sets["train"][state]:
            if group_id not in owners:
                yield Discrepancy(group_id, f"is {state} but in no batch")


def _batch(s: Snapshot, batch: Batch) -> Iterator[Discrepancy]:
    subject = f"batch:{batch.name}"
    if not batch.state:
        yield Discrepancy(subject, "was sealed but does not exist")
        return
    committed = batch.is_taken_back or batch.number < s.number("committed_step")
    trained = committed or batch.number < s.number("acked")
    if committed != (batch.state == State.COMMITTED):
        yield Discrepancy(subject, f"is {batch.state}, but committed_step is {s.number('committed_step')}")
    elif trained != (batch.state in (State.TRAINED, State.COMMITTED)):
        yield Discrepancy(subject, f"is {batch.state}, but {s.number('acked')} batches are acknowledged")
    if batch.commits != int(committed):
        yield Discrepancy(subject, f"is {batch.state}, and was committed {batch.commits} times")
    for group_id in batch.groups:
        state = s.state_of.get(group_id)
        if state and state != batch.state:
            yield Discrepancy(group_id, f"is {state}, its batch {batch.name} is {batch.state}")


def prompt_laws(snapshot: Snapshot, prompts: Mapping[str, int]) -> list[Discrepancy]:
    """Every prompt handed out belongs to one group, those aside that a rewind took back.

    Args:
        snapshot: One instant.
        prompts: Issue number of the prompt of each training group.
    """
    holders: dict[int, str] = {}
    found: list[Discrepancy] = []
    for group_id, prompt in sorted(prompts.items()):
        batch = snapshot.batch_of.get(group_id)
        if batch and batch.is_taken_back:
            continue
        if prompt in holders:
            found.append(Discrepancy(group_id, f"has prompt {prompt}, as {holders[prompt]} has"))
        holders[prompt] = group_id
    lost = (prompt for prompt in range(snapshot.number("cursor")) if prompt not in holders)
    return found + [Discrepancy(f"prompt {prompt}", "was taken, but no group has it") for prompt in lost]


def _difference(surplus: int) -> str:
    return f"{abs(surplus)} {'more' if surplus > 0 else 'fewer'}"
