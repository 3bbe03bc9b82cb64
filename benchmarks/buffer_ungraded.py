"""The buffer's own process with nothing to grade: a complete group is scored at once, 1 and 0 by turns.

Scoring, filtering and sealing stay as they are. What is left out is reading the responses back, making text of them,
and the call of the reward service.
"""

from __future__ import annotations

import asyncio

from flotilla.reward.v1 import reward_pb2
from services.buffer import __main__ as buffer
from services.buffer.grading import Grader
from services.common.service import run_service

SCORED = [
    reward_pb2.GradedItem(
        verdict=reward_pb2.VERDICT_SCORED, reason=reward_pb2.VERDICT_REASON_CORRECT, value=float(value)
    )
    for value in (1, 0)
]


class Ungraded(Grader):
    """Scores without looking."""

    async def _grade(self, group_ids: list[str]) -> None:
        groups = await self._ledger.groups(group_ids)
        verdicts = ([SCORED[index % 2] for index in range(one.number("finished"))] for one in groups)
        await asyncio.gather(*map(self._score, groups, verdicts))


if __name__ == "__main__":
    buffer.Grader = Ungraded
    run_service("buffer", buffer.setup, lambda spec: spec.services.buffer)
