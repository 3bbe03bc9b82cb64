"""Grades a batch: the cheap part here, the rest in workers, equal questions only once, groups in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from services.common.service import now_s
from services.reward import metrics
from services.reward.graders import Grader
from services.reward.pool import WorkerPool
from services.reward.verdicts import Graded, Item, Question, Verdict

TURN_S = 0.005
"""Of cheap grading between two turns of the event loop."""
MAX_LABEL_CHARACTERS = 10_000
"""A built-in grader can do nothing with a longer label."""

Asked = Sequence[tuple[Grader, Item]]


@dataclass(slots=True)
class _Piece:
    """What is asked about some items: one, or a group."""

    grader: Grader
    question: Question
    places: list[int]


async def grade_each(asked: Asked, pool_of: Callable[[Grader], WorkerPool]) -> list[Graded]:
    """One verdict for each item, in order, each by its own grader. Items without a group are one together.

    Raises:
        ResourceExhausted: Too many questions wait for workers; nothing was asked.
    """
    drafts = await _draft_all(asked)
    pieces = [_Piece(asked[at][0], draft, [at]) for at, draft in enumerate(drafts) if isinstance(draft, Question)]
    pieces += _group_pieces([(at, *asked[at]) for at, draft in enumerate(drafts) if draft is None])
    graded = {at: draft for at, draft in enumerate(drafts) if isinstance(draft, Graded)}
    for piece, answer in zip(pieces, await _ask_all(pieces, pool_of), strict=True):
        graded |= zip(piece.places, _split(answer, [asked[at][1] for at in piece.places]), strict=True)
    for at, (grader, _) in enumerate(asked):
        metrics.ITEMS.labels(grader.name, graded[at].verdict.value, graded[at].reason.value).inc()
    return [graded[at] for at in range(len(asked))]


async def _draft_all(asked: Asked) -> list[Graded | Question | None]:
    """What the cheap part says of each item; None where the grader judges groups."""
    drafts: list[Graded | Question | None] = []
    began = now_s()
    for grader, item in asked:
        drafts.append(None if grader.ask_about_group else _draft(grader, item))
        if now_s() - began > TURN_S:
            await asyncio.sleep(0)
            began = now_s()
    return drafts


def _draft(grader: Grader, item: Item) -> Graded | Question:
    if grader.digest and len(item.label) > MAX_LABEL_CHARACTERS:
        return Graded(Verdict.UNGRADABLE)
    try:
        return grader.grade_cheaply(item)
    except Exception as error:  # noqa: BLE001  whatever the item holds, the others are graded
        return Graded(Verdict.ERROR, failure=f"{grader.name}: {type(error).__name__}: {error}")


def _group_pieces(asked: Sequence[tuple[int, Grader, Item]]) -> list[_Piece]:
    """The questions about groups."""
    groups: dict[tuple[Grader, str], list[tuple[int, Item]]] = {}
    for at, grader, item in asked:
        groups.setdefault((grader, item.group_id), []).append((at, item))
    pieces = []
    for (grader, _), members in groups.items():
        assert grader.ask_about_group
        question = grader.ask_about_group([item for _, item in members])
        pieces.append(_Piece(grader, question, [at for at, _ in members]))
    return pieces


async def _ask_all(pieces: Sequence[_Piece], pool_of: Callable[[Grader], WorkerPool]) -> list[Graded]:
    """The answers, in order; equal questions are asked once if their answers must be equal."""
    keys: list[object] = []
    distinct: dict[WorkerPool, dict[object, _Piece]] = {}
    for at, piece in enumerate(pieces):
        pool = pool_of(piece.grader)
        keys.append((piece.grader, piece.question) if pool.remembers else at)
        distinct.setdefault(pool, {})[keys[-1]] = piece
    with ExitStack() as places:
        for pool, asked in distinct.items():
            places.enter_context(pool.reserve(len(asked)))
        async with asyncio.TaskGroup() as group:
            tasks = {
                key: group.create_task(pool.ask(piece.grader.target or piece.grader.name, piece.question))
                for pool, asked in distinct.items()
                for key, piece in asked.items()
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
