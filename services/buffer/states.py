"""The states of a group, and what may follow what. Every issued group is in exactly one state.

  WAITING ─lease─► GENERATING ─samples─► GENERATED ─graded─► SCORED ─filter─► KEPT ─seal─► READY ─lease─► IN_TRAINING
     ▲                 │ lease lost,         │                 │                              ▲                │ ack
     └──── PARTIAL ◄───┘ released            ▼                 ▼                 new epoch ───┴───────────  TRAINED
                                           FAILED           DROPPED                                           │ commit
                                                                                                          COMMITTED

The scripts in `lua/` make the moves; each is one atomic step in Redis. This table says which moves there are.
"""

from __future__ import annotations

import math
from enum import StrEnum

from services.common.spec import RolloutSpec


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
    State.WAITING: frozenset({State.GENERATING, State.STALE, State.FAILED}),
    State.PARTIAL: frozenset({State.GENERATING, State.STALE}),
    State.GENERATING: frozenset({State.WAITING, State.PARTIAL, State.GENERATED, State.STALE, State.FAILED}),
    State.GENERATED: frozenset({State.SCORED, State.FAILED}),
    State.SCORED: frozenset({State.KEPT, State.DROPPED, State.STALE, State.FAILED}),
    State.KEPT: frozenset({State.READY, State.STALE}),
    State.READY: frozenset({State.IN_TRAINING, State.COMMITTED, State.KEPT}),
    State.IN_TRAINING: frozenset({State.TRAINED, State.READY, State.COMMITTED, State.KEPT}),
    State.TRAINED: frozenset({State.COMMITTED, State.READY, State.KEPT}),
    State.COMMITTED: frozenset(),
    State.DROPPED: frozenset(),
    State.STALE: frozenset(),
    State.FAILED: frozenset(),
}


def keep_rate(rollout: RolloutSpec, recent_kept: int, recent_decided: int) -> float:
    """Share of graded groups that are kept, as if a batch had been kept of as many as are over-sampled at first."""
    return (recent_kept + rollout.rollout_batch_size) / (recent_decided + rollout.over_sampling)


def admission_credit(
    rollout: RolloutSpec, *, step: int, kept: int, in_play: int, recent_kept: int, recent_decided: int
) -> int:
    """Fresh groups that may be issued now; negative if more are out than that. Same formula as `lua/lease_work.lua`.

    With B the batch size, `kept + in_play <= (step + max_staleness + 1) * B + (over_sampling - B)` holds, and never are
    more batches aimed at than the run has. Refill `estimate` issues less where the keep rate promises enough; refill
    `batch` issues over_sampling groups at once whenever too few can still be kept, outside the bound.
    """
    size, over = rollout.rollout_batch_size, rollout.over_sampling
    missing = min(step + rollout.max_staleness + 1, rollout.num_rollout) * size - kept
    if rollout.refill == "batch":
        return over if in_play < missing else 0
    if rollout.dynamic_sampling_filter == "nonzero_std_with_fallback" and in_play >= missing:
        return 0
    likely = math.ceil(missing * (recent_decided + over) / (recent_kept + size))
    return min(missing + over - size, likely) - in_play
