"""The states of a group, and what may follow what. Every issued group is in exactly one state.

  WAITING ─lease─► GENERATING ─samples─► GENERATED ─graded─► SCORED ─filter─► KEPT ─seal─► READY ─lease─► IN_TRAINING
     ▲                 │ lease lost,         │                 │                              ▲                │ ack
     └──── PARTIAL ◄───┘ released            ▼                 ▼                 new epoch ───┴───────────  TRAINED
                                           FAILED           DROPPED                                           │ commit
                                                                                                          COMMITTED

The scripts in `lua/` make the moves; each is one atomic step in Redis. This table says which moves there are.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a group is in its life; names as in the proto, without prefix."""

    WAITING = "WAITING"
    GENERATING = "GENERATING"
    PARTIAL = "PARTIAL"
    GENERATED = "GENERATED"
    SCORED = "SCORED"
    KEPT = "KEPT"
    READY = "READY"
    IN_TRAINING = "IN_TRAINING"
    TRAINED = "TRAINED"
    COMMITTED = "COMMITTED"
    DROPPED = "DROPPED"
    STALE = "STALE"
    FAILED = "FAILED"


TERMINAL = frozenset({State.COMMITTED, State.DROPPED, State.STALE, State.FAILED})
IN_PLAY = frozenset({State.WAITING, State.GENERATING, State.PARTIAL, State.GENERATED, State.SCORED})
"""States that hold an admission credit because the group may still be kept."""

MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.GENERATING, State.FAILED}),
    State.PARTIAL: frozenset({State.GENERATING, State.STALE}),
    State.GENERATING: frozenset({State.WAITING, State.PARTIAL, State.GENERATED, State.FAILED}),
    State.GENERATED: frozenset({State.SCORED, State.FAILED}),
    State.SCORED: frozenset({State.KEPT, State.DROPPED}),
    State.KEPT: frozenset({State.READY, State.STALE}),
    State.READY: frozenset({State.IN_TRAINING, State.COMMITTED}),
    State.IN_TRAINING: frozenset({State.TRAINED, State.READY, State.COMMITTED}),
    State.TRAINED: frozenset({State.COMMITTED, State.READY}),
    State.COMMITTED: frozenset(),
    State.DROPPED: frozenset(),
    State.STALE: frozenset(),
    State.FAILED: frozenset(),
}


def admission_credit(
    *,
    live_step: int,
    kept: int,
    in_play: int,
    batch_size: int,
    over_sampling: int,
    max_staleness: int,
    num_rollout: int,
) -> int:
    """Fresh groups that may be issued now; negative if more are out than the bound allows.

    The bound is `kept + in_play <= (live_step + max_staleness + 1) * batch_size + (over_sampling - batch_size)`, and
    never more batches than the run has. `lua/lease_work.lua` applies the same formula.
    """
    batches = min(live_step + max_staleness + 1, num_rollout)
    return batches * batch_size + (over_sampling - batch_size) - kept - in_play
