"""Graders of the user's own: a Python function by import path, or a server that is asked over HTTP or gRPC.

Both run in the workers of a second pool, which keep their network and are killed at their deadline, so that neither can
hang the service. What they raise, and an answer that is no finite number, is ERROR.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from services.common.spec import RewardSpec
from services.reward.graders import Grader
from services.reward.pool import WorkerPool
from services.reward.remote import ask_service, post
from services.reward.verdicts import Graded, Item, Question, Verdict
from services.reward.worker import Decide

VERSION = "custom"
LOAD = Question("", "")
"""Asks for nothing but that the function is imported."""


def custom_grader(spec: RewardSpec) -> Grader:
    """The run's own grader; its digest is empty, since its source is not ours."""
    ask_about_group = ask_about_all if spec.custom_per_group else None
    return Grader(spec.grader, VERSION, "", ask_about, _in_workers_only, ask_about_group, spec.remote_url)


def custom_pool(spec: RewardSpec) -> WorkerPool:
    """Workers for it; nothing is remembered, since such a grader may change its mind."""
    loader = f"{__name__}:{find.__name__}"
    size, timeout_s = spec.custom_workers, spec.custom_timeout_s
    first_question = spec.remote_url or spec.grader, LOAD
    return WorkerPool(
        size, timeout_s, spec.max_queue, network=True, loader=loader, cache_size=0, first_question=first_question
    )


def ask_about(item: Item) -> Question:
    """The whole item as JSON."""
    return Question(json.dumps(_fields(item)), "")


def ask_about_all(items: Sequence[Item]) -> Question:
    """The items of a group as a JSON list."""
    return Question(json.dumps([_fields(one) for one in items]), "")


def _fields(item: Item) -> dict[str, Any]:
    return {one.name: getattr(item, one.name) for one in fields(item)}


def find(name: str) -> Decide:
    """The deciding function for a URL or for `package.module:function`. Raises what the import raises."""
    if name.startswith("grpc://"):
        return lambda question: _about_one(question, lambda item: ask_service(name, item))
    if name.startswith(("http://", "https://")):
        return lambda question: _about_one(question, lambda item: _scored(post(name, item)))
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    if not callable(found):
        raise TypeError(f"{name} is no function")
    return lambda question: _decide(found, question)


def _about_one(question: Question, grade: Callable[[Item], Graded]) -> Graded:
    return Graded(Verdict.SCORED) if question == LOAD else grade(Item(**json.loads(question.answer)))


def _decide(function: Callable[[Any], Any], question: Question) -> Graded:
    if question != LOAD and isinstance(asked := json.loads(question.answer), list):
        return _scores(_call(function, [Item(**one) for one in asked]), len(asked))
    return _about_one(question, lambda item: _scored(_call(function, item)))


def _call(function: Callable[[Any], Any], about: Item | list[Item]) -> Any:
    answer = function(about)
    return asyncio.run(_result(answer)) if inspect.isawaitable(answer) else answer


async def _result(answer: Any) -> Any:
    return await answer


def _scores(answers: Any, count: int) -> Graded:
    if not isinstance(answers, Sequence) or isinstance(answers, str):
        raise TypeError(f"a list of rewards is wanted, not {type(answers).__name__}")
    values = tuple(map(_score, answers))
    if len(values) != count:
        raise ValueError(f"{len(values)} rewards for a group of {count}")
    return Graded(Verdict.SCORED, values=values)


def _scored(answer: Any) -> Graded:
    return Graded(Verdict.SCORED, value=_score(answer))


def _score(answer: Any) -> float:
    if isinstance(answer, Mapping) and "reward" not in answer:
        raise ValueError(f"the answer has no `reward`, it has {', '.join(map(str, answer)) or 'nothing'}")
    value = answer["reward"] if isinstance(answer, Mapping) else answer
    if isinstance(value, str):
        raise TypeError("the reward is a text")
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return value


def _in_workers_only(question: Question) -> Graded:
    raise AssertionError("the workers find the function by the grader's name")
