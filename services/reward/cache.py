"""Remembers answers, so that what was answered, or has run into its deadline, costs no worker a second time.

Responses to one prompt mostly agree: 160 responses to 10 prompts held 43 different questions. A question is what a
grader's cheap part leaves of a response and a label. A process knows one version of each grader, so the name stands for
the version too. What may be different the next time, such as an error, is not remembered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from services.reward import metrics
from services.reward.verdicts import Graded, Question

CACHE_SIZE = 16_384
"""Answers; they take some 10 MiB."""
MAX_CHARACTERS = 1_000
"""A longer question is not remembered, so that the memory of the cache is bounded too."""

Key = tuple[str, Question]


@dataclass(slots=True)
class _InFlight:
    task: asyncio.Task[Graded]
    waiting: int = 0


class AnswerCache:
    """Answers by (grader, question), the least recently used forgotten first; use from one event loop."""

    def __init__(self, ask: Callable[[str, Question], Awaitable[tuple[Graded, bool]]], capacity: int) -> None:
        """`ask` says whether an answer would be the same again."""
        self._ask, self._capacity = ask, capacity
        self._known: OrderedDict[Key, Graded] = OrderedDict()
        self._in_flight: dict[Key, _InFlight] = {}

    async def ask(self, grader: str, question: Question) -> Graded:
        """The known answer, or the one that is on its way, or a new one; 0 seconds for a known one.

        A question is given up when all who wait for it have been cancelled.
        """
        key = (grader, question)
        if known := self._known.get(key):
            self._known.move_to_end(key)
            metrics.QUESTIONS.labels("hit").inc()
            return replace(known, seconds=0.0)
        metrics.QUESTIONS.labels("shared" if key in self._in_flight else "miss").inc()
        return await self._share(key)

    async def _share(self, key: Key) -> Graded:
        one = self._in_flight.get(key)
        if not one:
            one = self._in_flight[key] = _InFlight(asyncio.ensure_future(self._ask_and_remember(key)))
        one.waiting += 1
        try:
            return await asyncio.shield(one.task)
        finally:
            one.waiting -= 1
            if not one.waiting:
                self._in_flight.pop(key, None)
                one.task.cancel()

    async def _ask_and_remember(self, key: Key) -> Graded:
        graded, lasting = await self._ask(*key)
        if lasting and len(key[1].answer) + len(key[1].label) <= MAX_CHARACTERS:
            self._known[key] = graded
            if len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return graded
