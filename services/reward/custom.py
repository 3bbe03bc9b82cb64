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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from services.common.spec import RewardSpec
from services.reward.graders import Grader
from services.reward.pool import WorkerPool
from services.reward.remote import ask_service, post
from services.reward.verdicts import Graded, Item, Question, Verdict
from services.reward.worker import Decide

VERSION = "custom"


def custom_grader(spec: RewardSpec) -> Grader:
    """The run's own grader; its digest is empty, since its source is not ours."""
    ask_about_group = ask_about_all if spec.custom_per_group else None
    return Grader(spec.remote_url or spec.grader, VERSION, "", ask_about, _in_workers_only, ask_about_group)


def custom_pool(spec: RewardSpec) -> WorkerPool:
    """Workers for it; nothing is remembered, since such a grader may change its mind."""
    loader = f"{__name__}:{find.__name__}"
    size, timeout_s = spec.custom_workers, spec.custom_timeout_s
    return WorkerPool(size, timeout_s, spec.max_queue, network=True, loader=loader, cache_size=0)


def ask_about(item: Item) -> Question:
    """The whole item as JSON."""
    return Question(json.dumps(asdict(item)), "")


def ask_about_all(items: Sequence[Item]) -> Question:
    """The items of a group as a JSON list."""
    return Question(json.dumps([asdict(one) for one in items]), "")


def find(name: str) -> Decide:
    """The deciding function for a URL or for `package.module:function`. Raises what the import raises."""
    return lambda question: _decide(name, json.loads(question.answer))


def _decide(name: str, asked: Any) -> Graded:
    if isinstance(asked, list):
        return _scores(_call(name, [Item(**one) for one in asked]), len(asked))
    item = Item(**asked)
    if name.startswith("grpc://"):
        return ask_service(name, item)
    return Graded(Verdict.SCORED, value=_score(post(name, item) if name.startswith("http") else _call(name, item)))


def _call(name: str, about: Item | list[Item]) -> Any:
    module, _, function = name.partition(":")
    answer = getattr(importlib.import_module(module), function)(about)
    return asyncio.run(_result(answer)) if inspect.isawaitable(answer) else answer


async def _result(answer: Any) -> Any:
    return await answer


def _scores(answers: Any, count: int) -> Graded:
    values = tuple(map(_score, answers))
    if len(values) != count:
        raise ValueError(f"{len(values)} rewards for a group of {count}")
    return Graded(Verdict.SCORED, values=values)


def _score(answer: Any) -> float:
    value = float(answer["reward"] if isinstance(answer, Mapping) else answer)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return value


def _in_workers_only(question: Question) -> Graded:
    raise AssertionError("the workers find the function by the grader's name")
