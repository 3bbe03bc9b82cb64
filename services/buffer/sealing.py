"""Kept groups become batches: which of them, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
        ids = await self._ledger.group_ids("train", State.KEPT, count=MAX_KEPT)
        if len(ids) < rollout.rollout_batch_size:
            return None
        batch = int((await self._ledger.run_facts()).get("sealed", 0))
        if batch >= rollout.num_rollout or await self._must_wait(batch):
            return None
        window_end = None
        if rollout.seal_window:
            lowest = await self._ledger.oldest_in_play()
            window_end = float("inf") if lowest is None else lowest + rollout.seal_window
        kept = await self._ledger.groups(ids)
        chosen = choose_groups(kept, batch, rollout.rollout_batch_size, rollout.sample_age, window_end)
        return (batch, chosen) if chosen else None

    async def _must_wait(self, batch: int) -> bool:
        """True while groups in play would be too old for the batch after this one, within a deadline."""
        late = await self._ledger.aging(batch - self._run.spec.rollout.sample_age)
        if not late:
            return False
        if self._waiting_since[0] != batch:
            self._waiting_since = (batch, now_s())
        if now_s() - self._waiting_since[1] < self._run.spec.rollout.age_wait_s:
            return True
        log.warning("sealed without groups that are too old from now on", batch=batch, groups=late)
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
