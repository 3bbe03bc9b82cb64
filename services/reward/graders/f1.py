"""The `f1` rule for short free text: the F1 of the tokens that answer and label share, as SQuAD's evaluation has it.

Both are lower-cased, and freed of punctuation and articles. The value is the F1; the reason is CORRECT only at 1. A
label or answer that is yes, no or noanswer allows no partial credit. The answer is what follows the thinking.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from services.reward.verdicts import Graded, Item, Question, Reason, Verdict

VERSION = "1"
CHEAP_CHARACTERS = 20_000
"""A longer text is left to a worker, since it takes milliseconds."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PARTIAL_CREDIT = {"yes", "no", "noanswer"}


def grade_cheaply(item: Item) -> Graded | Question:
    """The verdict, or a long text for a worker."""
    answer = item.response.rpartition("</think>")[2]
    if not item.label.strip():
        return Graded(Verdict.UNGRADABLE)
    if not answer.strip():
        return item.scored(Reason.NO_ANSWER)
    question = Question(answer, item.label)
    return question if len(answer) + len(item.label) > CHEAP_CHARACTERS else decide(question)


def decide(question: Question) -> Graded:
    """The verdict on an answer."""
    value = f1(question.answer, question.label)
    return Graded(Verdict.SCORED, Reason.CORRECT if value == 1 else Reason.WRONG, value=value)


def f1(answer: str, label: str) -> float:
    """Harmonic mean of precision and recall of the answer's tokens, in [0, 1]."""
    answers, labels = tokens(answer), tokens(label)
    if answers != labels and any(" ".join(one) in _NO_PARTIAL_CREDIT for one in (answers, labels)):
        return 0.0
    shared = (Counter(answers) & Counter(labels)).total()
    return 2 * shared / (len(answers) + len(labels)) if shared else 0.0


def tokens(text: str) -> list[str]:
    """Words without case, punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
