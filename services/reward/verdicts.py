"""What graders are given and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Reason(Enum):
    """Why a score is what it is."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    NO_THINK_TAG = "no_think_tag"
    TRUNCATED = "truncated"
    UNSPECIFIED = "unspecified"
    """There is no score, or the grader gives no reasons."""


class Verdict(Enum):
    """How the grading of an item ended."""

    SCORED = "scored"
    UNGRADABLE = "ungradable"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Item:
    """One response to grade."""

    response: str
    label: str
    truncated: bool = False
    """The response was cut off by its length."""
    require_think: bool = True
    """Only what follows the thinking counts; off, a response without thinking counts as a whole."""
    prompt: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of the row of the data set."""
    group_id: str = ""

    def scored(self, reason: Reason) -> Graded:
        """A score with its reason; an answer that is missing because of the cut is told apart."""
        missing = reason in (Reason.NO_ANSWER, Reason.NO_THINK_TAG)
        return Graded(Verdict.SCORED, Reason.TRUNCATED if missing and self.truncated else reason)


@dataclass(frozen=True, slots=True)
class Question:
    """What is left for a worker to decide."""

    answer: str
    """The answer, or a piece of the response that holds it."""
    label: str
    """The label, out of its own box."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The verdict on one item."""

    verdict: Verdict
    reason: Reason = Reason.UNSPECIFIED
    seconds: float = 0.0
    """Time in the grader."""
    value: float | None = None
    """Partial credit; without it the run's configuration says what verdict and reason are worth."""
    values: tuple[float, ...] = ()
    """Of the items of a group, in order, from a grader that judges them together."""
    failure: str = ""
    """What went wrong, if there is no score."""
