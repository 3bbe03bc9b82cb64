"""Kept groups become batches: which of them, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from services.buffer.records import Group
from services.buffer.run import Run
from services.buffer.seal import make_manifest
from services.buffer.states import State
from services.common.kill_points import kill_point
from services.common.logs import get_logger
from services.common.service import now_s

MAX_KEPT = 1 << 20

log = get_logger(__name__)


def choose_groups(kept: Sequence[Group], batch: int, size: int, max_age: int, window_end: float | None) -> list[Group]:
    """The groups of the next batch, sorted by id; [] if there are too few.

    Args:
        kept: KEPT groups in the order in which they were kept.
        batch: Number of the batch.
        size: Groups in a batch.
        max_age: What is older than this in the batch after goes first.
        window_end: Groups issued from this number on must wait, and the others go in the order of issue; None
            takes the oldest weights first, and among equals what was kept first.
    """
    if window_end is None:
        order = sorted(kept, key=lambda group: group.number("oldest"))
    else:
        eligible = [group for group in kept if group.number("issue") < window_end]
        order = sorted(eligible, key=lambda group: (group.number("oldest") + max_age > batch, group.number("issue")))
    return sorted(order[:size], key=lambda group: group.group_id) if len(order) >= size else []


def saves_by_waiting(
    chosen: Sequence[int], kept: Sequence[int], in_play: Sequence[int], batch: int, size: int, max_age: int
) -> bool:
    """True if groups in play would become too old because of what is sealed now, and would not if they came first.

    Groups that must be in one of the next k + 1 batches need as many places: earliest deadline first.

    Args:
        chosen: Oldest step of each group that would be sealed.
        kept: The same of all kept groups, the chosen ones too.
        in_play: The same of the groups in play.
        batch: Number of the batch.
        size: Groups in a batch.
        max_age: Batches that a group may be older than its batch.
    """
    for last in {max(step + max_age, batch) for step in in_play}:
        urgent = [sum(step + max_age <= last for step in steps) for steps in (chosen, kept, in_play)]
        together = urgent[1] + urgent[2]
        if together - urgent[0] > max((last - batch) * size, together - size):
            return True
    return False


class Sealer:
    """Seals the batches of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ledger = run.ledger
        self._waiting_since: tuple[int, float] = (-1, 0.0)
        """The batch that waits for groups that would be too old for the next one, and since when."""

    async def step(self) -> None:
        """Seal as many batches as there are."""
        while chosen := await self._next():
            if not await self._seal(*chosen):
                return  # the run has gone back meanwhile
            await self._run.look_at_memory()
            self._run.turn()

    async def _next(self) -> tuple[int, list[Group]] | None:
        """The next batch and its groups, if it can be sealed now."""
        rollout = self._run.spec.rollout
        # What is in play is read before what is kept: a group that moves meanwhile is seen in both, not in neither.
        in_play = await self._ledger.aging()
        lowest = await self._ledger.oldest_in_play() if rollout.seal_window else None
        batch = int((await self._ledger.run_facts()).get("sealed", 0))
        ids = await self._ledger.group_ids("train", State.KEPT, count=MAX_KEPT)
        if len(ids) < rollout.rollout_batch_size or batch >= rollout.num_rollout:
            return None
        window_end = None
        if rollout.seal_window:
            window_end = float("inf") if lowest is None else lowest + rollout.seal_window
        kept = await self._ledger.groups(ids)
        chosen = choose_groups(kept, batch, rollout.rollout_batch_size, rollout.sample_age, window_end)
        if not chosen or self._must_wait(batch, chosen, kept, in_play):
            return None
        return batch, chosen

    def _must_wait(
        self, batch: int, chosen: Sequence[Group], kept: Sequence[Group], in_play: Mapping[str, int]
    ) -> bool:
        """True while the batch waits for groups that would become too old, within a deadline."""
        rollout, known = self._run.spec.rollout, {group.group_id for group in kept}
        is_late = saves_by_waiting(
            [group.number("oldest") for group in chosen],
            [group.number("oldest") for group in kept],
            [step for group_id, step in in_play.items() if group_id not in known],
            batch,
            rollout.rollout_batch_size,
            rollout.sample_age,
        )
        if not is_late:
            return False
        if self._waiting_since[0] != batch:
            self._waiting_since = (batch, now_s())
        if now_s() - self._waiting_since[1] < rollout.age_wait_s:
            return True
        log.warning("sealed without groups that become too old", batch=batch)
        return False

    async def _seal(self, batch: int, groups: list[Group]) -> bool:
        steps = self._run.spec.algorithm.num_steps_per_rollout
        live_epoch = int((await self._ledger.run_facts()).get("live_epoch", 0))
        interval = await self._ledger.interval(batch)
        manifest = await asyncio.to_thread(make_manifest, batch, groups, steps, interval, live_epoch)
        kill_point("buffer_before_seal")
        ids = [one.group_id for one in groups]
        sealed = await self._ledger.seal(batch, manifest.digest, manifest.SerializeToString(), ids)
        kill_point("buffer_after_seal")
        if sealed:
            log.info("sealed", batch=batch, mean_reward=round(manifest.stats.mean_reward, 4))
        return sealed
