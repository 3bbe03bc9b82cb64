"""The invariants of a ledger, on its model; each raises AssertionError where it is broken."""

from __future__ import annotations

from collections.abc import Iterable

from services.buffer.states import State
from tests.ledger_model import LedgerModel

IN_BATCH = (State.READY, State.IN_TRAINING, State.TRAINED, State.COMMITTED)


def conservation(model: LedgerModel) -> None:
    """Every group ever issued is in one state set, its own."""
    sizes = dict.fromkeys((False, True), 0)
    for (evaluation, state), groups in model.sets.items():
        sizes[evaluation] += len(groups)
        assert all(g.state is state and g.evaluates == evaluation for g in groups.values()), state
    assert sizes[False] == model.issued
    assert sum(sizes.values()) == len(model.groups)


def kept_once(model: LedgerModel) -> None:
    """kept_total counts what the live lineage has kept, and nothing else: no credit is lost or made."""
    assert model.kept_total == sum(len(b.groups) for b in model.batches) + len(model.in_state(State.KEPT))


def trained_once(model: LedgerModel) -> None:
    """Groups share the state of their batch, none is in two, and the committed batches are those below the commit."""
    members = [gid for batch in [*model.batches, *model.rewound] for gid in batch.groups]
    assert len(members) == len(set(members)), "a group is in two batches"
    assert len(members) == len(model.in_state(*IN_BATCH)), "a group is READY or beyond without a batch"
    for batch in model.batches:
        assert {model.groups[gid].state for gid in batch.groups} == {batch.state}
        assert batch.commits == int(batch.number < model.committed_step) == int(batch.state is State.COMMITTED)


def leased_once(model: LedgerModel) -> None:
    """A group has a token if and only if it is GENERATING; no token is given twice."""
    tokens = [group.token for group in model.leased()]
    assert all(tokens) and len(tokens) == len(set(tokens))
    assert len(tokens) == sum(bool(g.token) for g in model.groups.values())


def counters_in_order(model: LedgerModel) -> None:
    """Nothing is committed that was not acknowledged, or acknowledged that was not sealed."""
    assert 0 <= model.committed_step <= model.acked <= model.sealed <= model.rules.num_rollout


def no_lost_credit(model: LedgerModel) -> None:
    """While the run is open and fewer groups are out than the trainer will need, more may be issued."""
    if model.is_open() and model.kept_total + model.in_play() < model.target:
        assert model.credit() > 0


def kept_are_young(model: LedgerModel) -> None:
    """Whatever is KEPT can be sealed into the next batch."""
    assert not any(model.too_old(group) for group in model.in_state(State.KEPT))


LAWS = (conservation, kept_once, trained_once, leased_once, counters_in_order, no_lost_credit, kept_are_young)


def within_age(model: LedgerModel, batches: Iterable[int]) -> None:
    """No group of these batches is older than max_sample_age."""
    for number in batches:
        for gid in model.batches[number].groups:
            oldest = model.groups[gid].oldest
            assert oldest is not None and number - oldest <= model.rules.sample_age, (gid, number, oldest)
