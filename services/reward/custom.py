"""Graders of the user's own: a Python function by import path, or a server that is asked over HTTP.

Both run in the workers of a second pool, which keep their network and are killed at their deadline, so that neither can
hang the service. What they raise, and an answer that is no finite number, is ERROR.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from services.common.spec import MAX_CUSTOM_TIMEOUT_S, RewardSpec
from services.reward.graders import Grader
from services.reward.pool import WorkerPool
from services.reward.verdicts import Graded, Item, Question, Verdict
from services.reward.worker import Decide

VERSION = "custom"


def custom_grader(spec: RewardSpec) -> Grader:
    """The run's own grader; its digest is empty, since its source is not ours."""
    return Grader(spec.remote_url or spec.grader, VERSION, "", ask_about, _in_workers_only)


def custom_pool(spec: RewardSpec) -> WorkerPool:
    """Workers for it; nothing is remembered, since such a grader may change its mind."""
    loader = f"{__name__}:{find.__name__}"
    size, timeout_s = spec.custom_workers, spec.custom_timeout_s
    return WorkerPool(size, timeout_s, spec.max_queue, network=True, loader=loader, cache_size=0)


def ask_about(item: Item) -> Question:
    """The whole item as JSON."""
    return Question(json.dumps(asdict(item)), "")


def find(name: str) -> Decide:
    """The deciding function for a URL or for `package.module:function`. Raises what the import raises."""
    return lambda question: _score(_call(name, Item(**json.loads(question.answer))))


def _call(name: str, item: Item) -> Any:
    if name.startswith(("http://", "https://")):
        return _post(name, item)
    module, _, function = name.partition(":")
    answer = getattr(importlib.import_module(module), function)(item)
    return asyncio.run(_result(answer)) if inspect.isawaitable(answer) else answer


async def _result(answer: Any) -> Any:
    return await answer


def _post(url: str, item: Item) -> Any:
    about = asdict(item)
    body = json.dumps({name: about[name] for name in ("prompt", "response", "label", "metadata")}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310  a run spec allows http(s) only
    with urllib.request.urlopen(request, timeout=MAX_CUSTOM_TIMEOUT_S) as answer:  # noqa: S310
        return json.load(answer)


def _score(answer: Any) -> Graded:
    value = float(answer["reward"] if isinstance(answer, Mapping) else answer)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return Graded(Verdict.SCORED, value=value)


def _in_workers_only(question: Question) -> Graded:
    raise AssertionError("the workers find the function by the grader's name")
