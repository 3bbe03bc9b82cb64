"""Grades a batch: the cheap part here, the rest in workers, equal questions only once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.reward import metrics
from services.reward.graders import Grader
from services.reward.pool import WorkerPool
from services.reward.verdicts import Graded, Item, Question, Verdict

ITEMS_PER_TURN = 32
"""Items between two turns of the event loop: a few milliseconds of cheap grading."""


async def grade_each(asked: Sequence[tuple[Grader, Item]], pool_of: Callable[[Grader], WorkerPool]) -> list[Graded]:
    """One verdict for each item, in order, each by its own grader, one grader after the other.

    Raises:
        ResourceExhausted: Too many questions wait for workers.
    """
    graded: dict[int, Graded] = {}
    for grader in dict.fromkeys(grader for grader, _ in asked):
        places = [index for index, (other, _) in enumerate(asked) if other == grader]
        found = await grade_batch(grader, [asked[index][1] for index in places], pool_of(grader))
        graded |= dict(zip(places, found, strict=True))
    return [graded[index] for index in range(len(asked))]


async def grade_batch(grader: Grader, items: Sequence[Item], pool: WorkerPool) -> list[Graded]:
    """One verdict for each item, in order. Raises ResourceExhausted if too many questions wait for workers."""
    drafts: list[Graded | Question] = []
    for index, item in enumerate(items):
        drafts.append(grader.grade_cheaply(item))
        if index % ITEMS_PER_TURN == ITEMS_PER_TURN - 1:
            await asyncio.sleep(0)
    answers = await _ask_all(grader, {draft for draft in drafts if isinstance(draft, Question)}, pool)
    graded = [
        _with_answer(item, answers[draft]) if isinstance(draft, Question) else draft
        for item, draft in zip(items, drafts, strict=True)
    ]
    for one in graded:
        metrics.ITEMS.labels(grader.name, one.verdict.value, one.reason.value).inc()
    return graded


async def _ask_all(grader: Grader, questions: set[Question], pool: WorkerPool) -> dict[Question, Graded]:
    with pool.reserve(len(questions)):
        async with asyncio.TaskGroup() as group:
            tasks = {one: group.create_task(pool.ask(grader.name, one)) for one in questions}
    return {question: task.result() for question, task in tasks.items()}


def _with_answer(item: Item, answer: Graded) -> Graded:
    if answer.verdict is not Verdict.SCORED:
        return answer
    return replace(answer, reason=item.scored(answer.reason).reason)
