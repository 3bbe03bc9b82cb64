"""Grades a batch: the cheap part here, the rest in workers, equal questions only once, groups in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from services.common.errors import ResourceExhausted
from services.reward import metrics
from services.reward.graders import Grader
from services.reward.pool import WorkerPool
from services.reward.verdicts import Graded, Item, Question, Verdict

ITEMS_PER_TURN = 32
"""Items between two turns of the event loop: a few milliseconds of cheap grading."""

K = TypeVar("K", bound=Hashable)


async def grade_each(asked: Sequence[tuple[Grader, Item]], pool_of: Callable[[Grader], WorkerPool]) -> list[Graded]:
    """One verdict for each item, in order, each by its own grader.

    Raises:
        ResourceExhausted: Too many questions wait for workers; no item is graded any more.
    """
    places = _places(grader for grader, _ in asked)
    try:
        async with asyncio.TaskGroup() as batches:
            tasks = {
                grader: batches.create_task(grade_batch(grader, [asked[at][1] for at in where], pool_of(grader)))
                for grader, where in places.items()
            }
    except* ResourceExhausted as refused:
        error = refused.exceptions[0]
    else:
        graded: dict[int, Graded] = {}
        for grader, where in places.items():
            graded |= zip(where, tasks[grader].result(), strict=True)
        return [graded[at] for at in range(len(asked))]
    raise error


async def grade_batch(grader: Grader, items: Sequence[Item], pool: WorkerPool) -> list[Graded]:
    """One verdict for each item, in order. Raises ResourceExhausted if too many questions wait for workers."""
    graded = await (_grade_groups if grader.ask_about_group else _grade_items)(grader, items, pool)
    for one in graded:
        metrics.ITEMS.labels(grader.name, one.verdict.value, one.reason.value).inc()
    return graded


async def _grade_items(grader: Grader, items: Sequence[Item], pool: WorkerPool) -> list[Graded]:
    drafts: list[Graded | Question] = []
    for index, item in enumerate(items):
        drafts.append(grader.grade_cheaply(item))
        if index % ITEMS_PER_TURN == ITEMS_PER_TURN - 1:
            await asyncio.sleep(0)
    answers = iter(await _ask_all(grader, [draft for draft in drafts if isinstance(draft, Question)], pool))
    return [
        _with_answer(item, next(answers)) if isinstance(draft, Question) else draft
        for item, draft in zip(items, drafts, strict=True)
    ]


async def _grade_groups(grader: Grader, items: Sequence[Item], pool: WorkerPool) -> list[Graded]:
    """Verdicts of a grader that judges groups; items without a group are one together."""
    assert grader.ask_about_group
    places = _places(item.group_id for item in items)
    questions = [grader.ask_about_group([items[at] for at in where]) for where in places.values()]
    graded: dict[int, Graded] = {}
    for where, answer in zip(places.values(), await _ask_all(grader, questions, pool), strict=True):
        values = answer.values or [None] * len(where)
        graded |= {at: replace(answer, value=value, values=()) for at, value in zip(where, values, strict=True)}
    return [graded[at] for at in range(len(items))]


def _places(keys: Iterable[K]) -> dict[K, list[int]]:
    """Where each key stands."""
    places: dict[K, list[int]] = {}
    for at, key in enumerate(keys):
        places.setdefault(key, []).append(at)
    return places


async def _ask_all(grader: Grader, questions: Sequence[Question], pool: WorkerPool) -> list[Graded]:
    """The answers, in order; equal questions are asked once if their answers must be equal."""
    keys = questions if pool.remembers else range(len(questions))
    distinct = dict(zip(keys, questions, strict=True))
    with pool.reserve(len(distinct)):
        async with asyncio.TaskGroup() as group:
            tasks = {
                key: group.create_task(pool.ask(grader.target or grader.name, one)) for key, one in distinct.items()
            }
    return [tasks[key].result() for key in keys]


def _with_answer(item: Item, answer: Graded) -> Graded:
    if answer.verdict is not Verdict.SCORED:
        return answer
    return replace(answer, reason=item.scored(answer.reason).reason)
