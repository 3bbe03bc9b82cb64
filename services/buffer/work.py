"""What the buffer does by itself: take back lapsed leases, have complete groups graded, filter, seal.

    expire_loop ──► lapsed leases back to WAITING, late evaluations to FAILED
    grade_loop  ──► GENERATED ─ RewardService.Grade ─► SCORED ─ filter ─► KEPT or DROPPED
    seal_loop   ──► rollout_batch_size KEPT groups ─► a READY batch

Each loop starts from what the ledger says, so a restart loses nothing; each wait ends at the next pulse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
from prometheus_client import Counter

from flotilla.common.v1 import common_pb2
from flotilla.reward.v1 import reward_pb2, reward_pb2_grpc
from services.buffer.ledger import Group
from services.buffer.rewards import drop_reason, shuffled
from services.buffer.run import RECHECK_S, Run
from services.buffer.seal import make_manifest
from services.buffer.states import State
from services.common.board import StatusBoard
from services.common.errors import FlotillaError, ResourceExhausted, Unavailable
from services.common.logs import get_logger
from services.common.rpc import call
from services.common.service import Backoff

EXPIRE_EVERY_S = 0.5
"""With the lease's time to live, bounds how long a dead gateway's work stays away."""
GRADE_CHUNK_SAMPLES = 256
"""Samples in one Grade call: few calls, and none too large."""
GRADE_TIMEOUT_S = 120.0
GRADE_PATIENCE_S = 30.0

VERDICTS = Counter("flotilla_buffer_verdicts_total", "Graded samples by verdict and reason", ["verdict", "reason"])
log = get_logger(__name__)


class Worker:
    """The loops of one run."""

    def __init__(self, run: Run, board: StatusBoard, reward_channel: grpc.aio.Channel) -> None:
        self._run = run
        self._ledger = run.ledger
        self._board = board
        self._reward = reward_pb2_grpc.RewardServiceStub(reward_channel)
        self._grading: set[str] = set()
        # A settle between reading the interval's counts and sealing would vanish from both batches' counts.
        self._settling = asyncio.Lock()

    def loops(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """The loops by name."""
        return {"expire": self.expire_loop, "grade": self.grade_loop, "seal": self.seal_loop}

    async def _forever(self, name: str, step: Callable[[], Awaitable[None]], every_s: float) -> None:
        """Repeat a step at every pulse; while Redis is away, wait for it."""
        backoff = Backoff()
        while True:
            beat = asyncio.ensure_future(self._run.pulse.wait(every_s))
            try:
                await step()
                backoff.reset()
            except Unavailable as error:
                log.warning("waiting", loop=name, error=str(error))
                with self._board.waiting(f"{name}: {error}"):
                    await backoff.wait()
            await beat

    # ------------------------------------------------------------------------------------------------ leases

    async def expire_loop(self) -> None:
        """Take back what lapsed."""
        while True:
            try:
                if await self._ledger.expire():
                    self._run.pulse.beat()
            except Unavailable as error:
                log.warning("waiting", loop="expire", error=str(error))
            await asyncio.sleep(EXPIRE_EVERY_S)

    # ------------------------------------------------------------------------------------------------ grading

    async def grade_loop(self) -> None:
        """Grade every complete group."""
        await self._forever("grade", self._grade_all, RECHECK_S)

    async def _grade_all(self) -> None:
        for ledger in ("eval", "train"):
            for group_id in await self._ledger.group_ids(ledger, State.SCORED) if ledger == "train" else ():
                await self._settle(group_id)
            waiting = [g for g in await self._ledger.group_ids(ledger, State.GENERATED) if g not in self._grading]
            size = max(1, GRADE_CHUNK_SAMPLES // max(map(self._run.group_size, waiting), default=1))
            for at in range(0, len(waiting), size):
                self._start_grading(waiting[at : at + size])

    def _start_grading(self, group_ids: list[str]) -> None:
        self._grading.update(group_ids)
        task = asyncio.ensure_future(self._grade(group_ids))
        task.add_done_callback(lambda done: self._graded(group_ids, done))

    def _graded(self, group_ids: list[str], task: asyncio.Task[None]) -> None:
        self._grading.difference_update(group_ids)
        if not task.cancelled() and (error := task.exception()):
            log.warning("grading will be tried again", groups=len(group_ids), error=str(error))
        self._run.pulse.beat()

    async def _grade(self, group_ids: list[str]) -> None:
        groups = await self._ledger.groups(group_ids)
        rows = [(group.group_id, index) for group in groups for index in group.headers()]
        items = [self._item(payload, group_id) for payload, group_id in await self._items_of(groups, rows)]
        request = reward_pb2.GradeRequest(
            run_id=self._run.spec.run_id, grader=self._run.spec.reward.grader, items=items
        )
        with self._board.waiting("verdicts from the reward service"):
            try:
                answer = await call(self._reward.Grade, request, timeout_s=GRADE_TIMEOUT_S, patience_s=GRADE_PATIENCE_S)
            except (Unavailable, ResourceExhausted):
                raise
            except FlotillaError as error:
                for group_id in group_ids:
                    await self._ledger.fail_group(group_id, "GRADING", str(error))
                raise
        at = 0
        for group in groups:
            count = len(group.headers())
            await self._score(group, answer.items[at : at + count])
            at += count

    async def _items_of(self, groups: list[Group], rows: list[tuple[str, int]]) -> list[tuple[bytes, Group]]:
        by_id = {group.group_id: group for group in groups}
        payloads = await self._ledger.payloads(rows)
        assert all(payloads), "payloads are kept until a group is settled"
        return [(payload, by_id[group_id]) for payload, (group_id, _) in zip(payloads, rows, strict=True) if payload]

    def _item(self, payload: bytes, group: Group) -> reward_pb2.GradeItem:
        sample = common_pb2.Sample.FromString(payload)
        return reward_pb2.GradeItem(
            response=self._run.tokenizer.decode(sample.response_token_ids, skip_special_tokens=False),
            label=self._run.prompt(group).label,
            truncated=sample.finish_reason == common_pb2.FINISH_REASON_LENGTH,
        )

    async def _score(self, group: Group, items: list[reward_pb2.GradedItem]) -> None:
        names = [(_short(reward_pb2.Verdict, i.verdict), _short(reward_pb2.VerdictReason, i.reason)) for i in items]
        for verdict, reason in names:
            VERDICTS.labels(verdict, reason).inc()
        rewards = [item.value for item in items]
        if self._run.spec.rollout.shuffle_rewards and not group.is_evaluation:
            rewards = shuffled(rewards, f"{self._run.spec.rollout.seed}:{group.group_id}")
        await self._ledger.score(group.group_id, rewards, [f"{v}:{r}" for v, r in names])
        if not group.is_evaluation:
            await self._settle(group.group_id)

    async def _settle(self, group_id: str) -> None:
        (group,) = await self._ledger.groups([group_id])
        rewards = group.rewards()
        reason = drop_reason(self._run.spec.rollout.dynamic_sampling_filter, rewards)
        async with self._settling:
            await self._ledger.settle(group_id, reason, rewards)

    # ------------------------------------------------------------------------------------------------ batches

    async def seal_loop(self) -> None:
        """Seal a batch whenever enough groups are kept."""
        await self._forever("seal", self._seal_all, RECHECK_S)

    async def _seal_all(self) -> None:
        size = self._run.spec.rollout.rollout_batch_size
        while len(kept := await self._ledger.group_ids("train", State.KEPT, count=size)) == size:
            async with self._settling:
                await self._seal(sorted(kept))
            self._run.pulse.beat()

    async def _seal(self, group_ids: list[str]) -> None:
        batch = int((await self._ledger.run_facts()).get("sealed", 0))
        groups = await self._ledger.groups(group_ids)
        steps = self._run.spec.algorithm.num_steps_per_rollout
        manifest = make_manifest(batch, groups, steps, await self._ledger.interval())
        await self._ledger.seal(batch, manifest.digest, manifest.SerializeToString(), group_ids)
        log.info("sealed", batch=batch, mean_reward=round(manifest.stats.mean_reward, 4))


def _short(enum: type, value: int) -> str:
    """The name of a proto value without its prefix."""
    name = enum.Name(value)  # pyright: ignore[reportAttributeAccessIssue]
    prefix = {"Verdict": "VERDICT_", "VerdictReason": "VERDICT_REASON_"}[enum.DESCRIPTOR.name]  # pyright: ignore[reportAttributeAccessIssue]
    return name.removeprefix(prefix)
