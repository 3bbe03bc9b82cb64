"""Complete groups are graded and filtered: GENERATED ─ RewardService.Grade ─► SCORED ─ filter ─► KEPT or DROPPED."""

from __future__ import annotations

import asyncio
import json
from itertools import islice

import grpc
from prometheus_client import Counter

from flotilla.common.v1 import common_pb2
from flotilla.reward.v1 import reward_pb2, reward_pb2_grpc
from services.buffer.data import Prompt
from services.buffer.filters import SampledGroup, SampledSample, decide
from services.buffer.hooks import HookFailed
from services.buffer.records import Group
from services.buffer.rewards import shuffled
from services.buffer.run import Run
from services.buffer.states import State
from services.common.board import StatusBoard
from services.common.errors import DeadlineExceeded, FlotillaError, ResourceExhausted, Unavailable
from services.common.kill_points import kill_point
from services.common.logs import get_logger
from services.common.prompts import GRADER_KEY
from services.common.rpc import call

GRADE_CHUNK_SAMPLES = 256
"""Samples in one Grade call: few calls, and none too large."""
GRADE_CHUNK_TOKENS = 4 << 20
"""Tokens in one Grade call, at most: as text they must fit into one message."""
GRADE_CALLS = 16
"""Grade calls at once: the time of one counts from when the reward service has it."""
GRADE_TIMEOUT_S = 120.0
GRADE_PATIENCE_S = 30.0

VERDICTS = Counter("flotilla_buffer_verdicts_total", "Graded samples by verdict and reason", ["verdict", "reason"])
log = get_logger(__name__)


class Grader:
    """Grades every complete group of one run, and decides whether it is kept."""

    def __init__(self, run: Run, board: StatusBoard, reward_channel: grpc.aio.Channel) -> None:
        self._run = run
        self._ledger = run.ledger
        self._board = board
        self._reward = reward_pb2_grpc.RewardServiceStub(reward_channel)
        self._calls = asyncio.Semaphore(GRADE_CALLS)
        self._grading: set[str] = set()
        self._ends = set(run.tokenizer.all_special_ids)

    async def step(self) -> None:
        """Start grading whatever waits for it."""
        for group_id in await self._ledger.group_ids("train", State.SCORED):
            if group_id not in self._grading:
                (group,) = await self._ledger.groups([group_id])
                if group.state is State.SCORED:
                    await self._settle(group)
        for ledger in ("eval", "train"):
            waiting = [g for g in await self._ledger.group_ids(ledger, State.GENERATED) if g not in self._grading]
            size = max(1, self._chunk_samples(ledger) // max(map(self._run.group_size, waiting), default=1))
            for at in range(0, len(waiting), size):
                self._start(waiting[at : at + size])

    def _chunk_samples(self, ledger: str) -> int:
        spec = self._run.spec
        longest = (spec.evaluation if ledger == "eval" else spec.rollout).max_response_tokens
        return min(GRADE_CHUNK_SAMPLES, GRADE_CHUNK_TOKENS // longest)

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
        samples = await self._samples(groups)
        items = await asyncio.to_thread(self._items, groups, samples)
        request = reward_pb2.GradeRequest(
            run_id=self._run.spec.run_id, grader=self._run.spec.reward.grader, items=items
        )
        with self._board.waiting("verdicts from the reward service"):
            try:
                async with self._calls:
                    grade = self._reward.Grade
                    answer = await call(grade, request, timeout_s=GRADE_TIMEOUT_S, patience_s=GRADE_PATIENCE_S)
            except (Unavailable, ResourceExhausted, DeadlineExceeded):
                raise
            except FlotillaError as error:
                for group_id in group_ids:
                    await self._ledger.fail_group(group_id, State.GENERATED, "GRADING", str(error))
                raise
        if len(answer.items) != len(items):
            raise Unavailable(f"the reward service gave {len(answer.items)} verdicts for {len(items)} responses")
        verdicts = iter(answer.items)
        ours = [list(islice(verdicts, len(one))) for one in samples]
        await asyncio.gather(*map(self._score, groups, ours))

    async def _samples(self, groups: list[Group]) -> list[list[bytes]]:
        """Payloads of each group."""
        rows = [(group.group_id, index) for group in groups for index in range(group.number("finished"))]
        payloads = await self._ledger.payloads(rows)
        assert all(payloads), "payloads are kept until a group is settled"
        found = iter(payloads)
        return [[one for one in islice(found, group.number("finished")) if one] for group in groups]

    def _texts(self, samples: list[common_pb2.Sample]) -> list[str]:
        """Responses as graders and hooks see them: with special tokens, but for the one that ended the generation."""
        ids = [list(one.response_token_ids) for one in samples]
        for one, sample in zip(ids, samples, strict=True):
            if one and sample.finish_reason == common_pb2.FINISH_REASON_STOP and one[-1] in self._ends:
                del one[-1]
        # Unlike decode(), it lets other threads run meanwhile.
        return self._run.tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=False)

    def _items(self, groups: list[Group], payloads: list[list[bytes]]) -> list[reward_pb2.GradeItem]:
        samples = [[common_pb2.Sample.FromString(one) for one in ours] for ours in payloads]
        texts = iter(self._texts([one for ours in samples for one in ours]))
        return [
            reward_pb2.GradeItem(
                response=next(texts),
                truncated=one.finish_reason == common_pb2.FINISH_REASON_LENGTH,
                group_id=group.group_id,
                **about,
            )
            for group, ours in zip(groups, samples, strict=True)
            for about in [self._about(self._run.prompt(group))]
            for one in ours
        ]

    def _about(self, prompt: Prompt) -> dict[str, str]:
        """What the items of one prompt share; the prompt's text only where the grader may read it."""
        reads_prompt = self._run.spec.reward.is_custom
        return {
            "label": prompt.label,
            "grader": str(prompt.metadata.get(GRADER_KEY) or ""),
            "metadata": json.dumps(prompt.metadata) if prompt.metadata else "",
            "prompt": self._run.tokenizer.decode(prompt.token_ids) if reads_prompt else "",
        }

    async def _score(self, group: Group, items: list[reward_pb2.GradedItem]) -> None:
        names = [
            (
                reward_pb2.Verdict.Name(item.verdict).removeprefix("VERDICT_"),
                reward_pb2.VerdictReason.Name(item.reason).removeprefix("VERDICT_REASON_"),
            )
            for item in items
        ]
        rewards = [item.value for item in items]
        if self._run.spec.rollout.shuffle_rewards and not group.is_evaluation:
            rewards = shuffled(rewards, f"{self._run.spec.rollout.seed}:{group.group_id}")
        verdicts = [f"{v}:{r}" for v, r in names]
        moved = await self._ledger.score(group.group_id, rewards, verdicts)
        kill_point("buffer_after_score")
        if not moved:
            return
        for verdict, reason in names:
            VERDICTS.labels(verdict, reason).inc()
        if not group.is_evaluation:
            await self._settle(group.graded(rewards, verdicts))

    async def _settle(self, group: Group) -> None:
        chosen = self._run.group_filter
        try:
            keep, reason = await decide(chosen, await self._sampled(group, chosen.needs_text))
        except HookFailed as error:
            await self._ledger.fail_group(group.group_id, State.SCORED, "FILTER", str(error))
            return
        await self._ledger.settle(
            group.group_id, keep, reason, group.rewards(), keep_when_insufficient=chosen.keep_when_insufficient
        )

    async def _responses(self, group: Group) -> list[str]:
        (payloads,) = await self._samples([group])
        return await asyncio.to_thread(self._texts, [common_pb2.Sample.FromString(one) for one in payloads])

    async def _sampled(self, group: Group, with_text: bool) -> SampledGroup:
        """A graded group as a filter sees it."""
        headers, verdicts = group.headers(), [one.split(":") for one in group.verdicts()]
        texts = await self._responses(group) if with_text else [""] * len(headers)
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
