"""What runs in a grader's process: one question at a time, as lines of JSON over a socket, within hard limits.

The parent keeps the deadline and kills. The limits of services/reward/sandbox.py hold even if the parent cannot.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from services.reward import sandbox
from services.reward.graders import GRADERS
from services.reward.graders.symbolic import is_zero
from services.reward.verdicts import Graded, Question, Reason, Verdict

MAX_ERROR_CHARS = 500
"""An exception's text may quote a whole response."""
Decide = Callable[[Question], Graded]
Loader = Callable[[str], Decide]
"""Finds the deciding function of a grader by its name; runs in workers."""


def built_in(grader: str) -> Decide:
    """The deciding function of one of the graders that there are."""
    return GRADERS[grader].decide


def warm_up() -> None:
    """Have sympy load now what it loads at its first use, a tenth of a second."""
    is_zero("(x*(x+1))-(x^2+x)")


def load(loader: str) -> Loader:
    """The loader at `module:function`."""
    module, _, function = loader.partition(":")
    return getattr(importlib.import_module(module), function)


def work(sock: socket.socket, cpu_s: float, loader: Loader) -> None:
    """Answer questions until the socket closes; one that takes more than `cpu_s` of CPU time, if not 0, ends it."""
    own = os.getpid()
    with sock, sock.makefile("rwb") as stream:
        for line in stream:
            if cpu_s:
                sandbox.limit_cpu(cpu_s)
            answer = _answer(line, loader)
            if os.getpid() != own:
                os._exit(0)  # a grader forked, and this is the child
            stream.write(answer)
            stream.flush()


def encode_question(number: int, grader: str, question: Question) -> bytes:
    """The line that asks a worker; its answer repeats the number."""
    return json.dumps({"number": number, "grader": grader, **asdict(question)}).encode() + b"\n"


def decode_answer(number: int, line: bytes) -> Graded:
    """What a worker answered. Raises ValueError or TypeError if that is no answer to the question of this number."""
    answered, verdict, reason, value, values, failure = json.loads(line)
    if answered != number:
        raise ValueError(f"an answer to question {answered} came for question {number}")
    return Graded(Verdict(verdict), Reason(reason), value=value, values=tuple(values), failure=failure)


def _answer(line: bytes, loader: Loader) -> bytes:
    content = json.loads(line)
    number, name = content.pop("number"), content.pop("grader")
    try:
        graded = loader(name)(Question(**content))
        return _encode(number, graded)
    except Exception as error:  # noqa: BLE001  a grader may raise or return anything; it is counted as an error
        return _encode(number, Graded(Verdict.ERROR, failure=f"{name}: {_describe(error)}"))


def _describe(error: Exception) -> str:
    """The exception in one line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] + place


def _encode(number: int, graded: Graded) -> bytes:
    answer = [number, graded.verdict.value, graded.reason.value, graded.value, graded.values, graded.failure]
    return json.dumps(answer).encode() + b"\n"
