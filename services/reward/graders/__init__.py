"""The graders that there are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.reward.graders import deepscaler, latex_symbols, latex_text, symbolic
from services.reward.verdicts import Graded, Item, Question, Reason


@dataclass(frozen=True, slots=True)
class Grader:
    """A rule in two parts: a cheap one for the service itself, and one for workers, which may take any time."""

    name: str
    version: str
    digest: str
    """SHA-256 of the source of the rule, in hexadecimal."""
    grade_cheaply: Callable[[Item], Graded | Question]
    decide: Callable[[Question], Reason]


def _digest(*modules: object) -> str:
    sources = (Path(str(getattr(module, "__file__", ""))).read_bytes() for module in modules)
    return hashlib.sha256(b"".join(sources)).hexdigest()


GRADERS = {
    "deepscaler": Grader(
        name="deepscaler",
        version=deepscaler.VERSION,
        digest=_digest(deepscaler, latex_text, latex_symbols, symbolic),
        grade_cheaply=deepscaler.grade_cheaply,
        decide=deepscaler.decide,
    )
}
