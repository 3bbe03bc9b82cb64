"""Complete groups are graded and filtered: GENERATED ─ RewardService.Grade ─► SCORED ─ filter ─► KEPT or DROPPED."""

from __future__ import annotations

import asyncio

import grpc
from prometheus_client import Counter

from flotilla.common.v1 import common_pb2
from flotilla.reward.v1 import reward_pb2, reward_pb2_grpc
from services.buffer.filters import SampledGroup, SampledSample, decide
from services.buffer.hooks import HookFailed
from services.buffer.records import Group
from services.buffer.rewards import shuffled
from services.buffer.run import Run
from services.buffer.states import State
from services.common.board import StatusBoard
from services.common.errors import FlotillaError, ResourceExhausted, Unavailable
from services.common.kill_points import kill_point
from services.common.logs import get_logger
from services.common.rpc import call

GRADE_CHUNK_SAMPLES = 256
"""Samples in one Grade call: few calls, and none too large."""
GRADE_TIMEOUT_S = 120.0
GRADE_PATIENCE_S = 30.0

VERDICTS = Counter("flotilla_buffer_verdicts_total", "Graded samples by verdict and reason", ["verdict", "reason"])
log = get_logger(__name__)


class Grader:
    """Grades every complete group of one run, and decides whether it is kept."""

    def __init__(self, run: Run, board: StatusBoard, reward_channel: grpc.aio.Channel, settling: asyncio.Lock) -> None:
        """Args:
        run: The run.
        board: Where waits are shown.
        reward_channel: To the reward service.
        settling: Held while a group is settled: the counts of a seal must not change while it is made.
        """
        self._run = run
        self._ledger = run.ledger
        self._board = board
        self._reward = reward_pb2_grpc.RewardServiceStub(reward_channel)
        self._settling = settling
        self._grading: set[str] = set()

    async def step(self) -> None:
        """Start grading whatever waits for it."""
        for group_id in await self._ledger.group_ids("train", State.SCORED):
            if group_id not in self._grading:
                await self._settle(group_id)
        for ledger in ("eval", "train"):
            waiting = [g for g in await self._ledger.group_ids(ledger, State.GENERATED) if g not in self._grading]
            size = max(1, GRADE_CHUNK_SAMPLES // max(map(self._run.group_size, waiting), default=1))
            for at in range(0, len(waiting), size):
                self._start(waiting[at : at + size])

    def _start(self, group_ids: list[str]) -> None:
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
        samples = [await self._samples(group) for group in groups]
        items = [self._item(one, group) for group, ours in zip(groups, samples, strict=True) for one in ours]
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
                    await self._ledger.fail_group(group_id, State.GENERATED, "GRADING", str(error))
                raise
        at = 0
        for group, ours in zip(groups, samples, strict=True):
            await self._score(group, answer.items[at : at + len(ours)])
            at += len(ours)

    async def _samples(self, group: Group) -> list[common_pb2.Sample]:
        payloads = await self._ledger.payloads((group.group_id, index) for index in group.headers())
        assert all(payloads), "payloads are kept until a group is settled"
        return [common_pb2.Sample.FromString(payload) for payload in payloads if payload]

    def _text(self, sample: common_pb2.Sample) -> str:
        return self._run.tokenizer.decode(sample.response_token_ids, skip_special_tokens=False)

    def _item(self, sample: common_pb2.Sample, group: Group) -> reward_pb2.GradeItem:
        return reward_pb2.GradeItem(
            response=self._text(sample),
            label=self._run.prompt(group).label,
            truncated=sample.finish_reason == common_pb2.FINISH_REASON_LENGTH,
        )

    async def _score(self, group: Group, items: list[reward_pb2.GradedItem]) -> None:
        names = [
            (
                reward_pb2.Verdict.Name(item.verdict).removeprefix("VERDICT_"),
                reward_pb2.VerdictReason.Name(item.reason).removeprefix("VERDICT_REASON_"),
            )
            for item in items
        ]
        for verdict, reason in names:
            VERDICTS.labels(verdict, reason).inc()
        rewards = [item.value for item in items]
        if self._run.spec.rollout.shuffle_rewards and not group.is_evaluation:
            rewards = shuffled(rewards, f"{self._run.spec.rollout.seed}:{group.group_id}")
        await self._ledger.score(group.group_id, rewards, [f"{v}:{r}" for v, r in names])
        kill_point("buffer_after_score")
        if not group.is_evaluation:
            await self._settle(group.group_id)

    async def _settle(self, group_id: str) -> None:
        (group,) = await self._ledger.groups([group_id])
        if group.state is not State.SCORED:
            return
        chosen = self._run.group_filter
        try:
            keep, reason = await decide(chosen, await self._sampled(group, chosen.needs_text))
        except HookFailed as error:
            await self._ledger.fail_group(group.group_id, State.SCORED, "FILTER", str(error))
            return
        async with self._settling:
            await self._ledger.settle(
                group.group_id, keep, reason, group.rewards(), keep_when_insufficient=chosen.keep_when_insufficient
            )

    async def _sampled(self, group: Group, with_text: bool) -> SampledGroup:
        """A graded group as a filter sees it."""
        headers, verdicts = group.headers(), [one.split(":") for one in group.verdicts()]
        texts = [self._text(one) for one in await self._samples(group)] if with_text else [""] * len(headers)
        prompt = self._run.prompt(group)
        return SampledGroup(
            group_id=group.group_id,
            prompt=self._run.tokenizer.decode(prompt.token_ids) if with_text else "",
            label=prompt.label,
            samples=tuple(
                SampledSample(
                    index=index,
                    response=text,
                    response_tokens=header.response_tokens,
                    reward=reward,
                    verdict=verdict,
                    reason=reason,
                    truncated=header.finish_reason == common_pb2.FINISH_REASON_LENGTH,
                    oldest_step=header.oldest_step,
                )
                for (index, header), text, reward, (verdict, reason) in zip(
                    headers.items(), texts, group.rewards(), verdicts, strict=True
                )
            ),
        )
