"""Grades a batch: the cheap part here, the rest in workers, equal questions only once, groups in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from services.common.service import now_s
from services.reward import metrics
from services.reward.complaints import Complaints
from services.reward.graders import Grader
from services.reward.pool import WorkerPool
from services.reward.verdicts import Graded, Item, Question, Verdict

TURN_S = 0.005
"""Of cheap grading between two turns of the event loop."""
MAX_LABEL_CHARACTERS = 10_000
"""A built-in grader can do nothing with a longer label."""

COMPLAINTS = Complaints()

Asked = Sequence[tuple[Grader, Item]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a grader judges at once: an item, or the items of a group."""

    grader: Grader
    places: Sequence[int]
    items: Sequence[Item]


async def grade_each(asked: Asked, pool_of: Callable[[Grader], WorkerPool]) -> list[Graded]:
    """One verdict for each item, in order, each by its own grader. Items without a group are one together.

    Raises:
        ResourceExhausted: Too many questions wait for workers; nothing was asked.
    """
    pieces = _pieces(asked)
    drafts = await _draft_all(pieces)
    questions = [(one.grader, draft) for one, draft in zip(pieces, drafts, strict=True) if isinstance(draft, Question)]
    answers = iter(await _ask_all(questions, pool_of))
    graded: dict[int, Graded] = {}
    for piece, draft in zip(pieces, drafts, strict=True):
        answer = next(answers) if isinstance(draft, Question) else draft
        if answer.verdict in (Verdict.ERROR, Verdict.TIMEOUT):
            COMPLAINTS.complain(answer.failure)
        graded |= zip(piece.places, _split(answer, piece.items), strict=True)
    for at, (grader, _) in enumerate(asked):
        metrics.ITEMS.labels(grader.name, graded[at].verdict.value, graded[at].reason.value).inc()
    return [graded[at] for at in range(len(asked))]


def _pieces(asked: Asked) -> list[_Piece]:
    places: dict[tuple[Grader, object], list[int]] = {}
    for at, (grader, item) in enumerate(asked):
        places.setdefault((grader, item.group_id if grader.ask_about_group else at), []).append(at)
    return [_Piece(grader, where, [asked[at][1] for at in where]) for (grader, _), where in places.items()]


async def _draft_all(pieces: Sequence[_Piece]) -> list[Graded | Question]:
    """What the graders' cheap parts say."""
    drafts, began = [], now_s()
    for piece in pieces:
        drafts.append(_draft(piece))
        if now_s() - began > TURN_S:
            await asyncio.sleep(0)
            began = now_s()
    return drafts


def _draft(piece: _Piece) -> Graded | Question:
    grader = piece.grader
    try:
        if grader.ask_about_group:
            return grader.ask_about_group(piece.items)
        if grader.digest and len(piece.items[0].label) > MAX_LABEL_CHARACTERS:
            return Graded(Verdict.UNGRADABLE)
        return grader.grade_cheaply(piece.items[0])
    except Exception as error:  # noqa: BLE001  whatever an item holds, the others are graded
        return Graded(Verdict.ERROR, failure=f"{grader.name}: {type(error).__name__}: {error}")


async def _ask_all(
    questions: Sequence[tuple[Grader, Question]], pool_of: Callable[[Grader], WorkerPool]
) -> list[Graded]:
    """The answers, in order; equal questions are asked once if their answers must be equal."""
    keys: list[object] = []
    distinct: dict[WorkerPool, dict[object, tuple[Grader, Question]]] = {}
    for at, (grader, question) in enumerate(questions):
        pool = pool_of(grader)
        keys.append((grader, question) if pool.remembers else at)
        distinct.setdefault(pool, {})[keys[-1]] = grader, question
    with ExitStack() as places:
        for pool, asked in distinct.items():
            places.enter_context(pool.reserve(len(asked)))
        async with asyncio.TaskGroup() as group:
            tasks = {
                key: group.create_task(pool.ask(grader.target or grader.name, question))
                for pool, asked in distinct.items()
                for key, (grader, question) in asked.items()
            }
    return [tasks[key].result() for key in keys]


def _split(answer: Graded, items: Sequence[Item]) -> list[Graded]:
    """The answer to a question, for each item that it was about."""
    if answer.verdict is not Verdict.SCORED:
        return [answer] * len(items)
    values = answer.values or [answer.value] * len(items)
    reasons = [item.scored(answer.reason).reason for item in items]
    return [
        replace(answer, reason=reason, value=value, values=()) for reason, value in zip(reasons, values, strict=True)
    ]
