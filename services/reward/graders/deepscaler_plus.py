"""The `deepscaler_plus` rule for mathematical answers: the last box after the thinking, right if it means the label.

Unlike `deepscaler` it compares what answers mean: numbers exactly, units, sets, intervals, matrices, equations and so
on each in their own way, and expressions by a bounded evaluation of their own. Nothing of a response is executed.
"""

from __future__ import annotations

import re

from services.reward.graders.expressions.evaluate import read_number
from services.reward.graders.plus.compare import same, same_text
from services.reward.verdicts import Graded, Item, Question, Reason, Verdict

VERSION = "1"
CHEAP_CHARACTERS = 4096
"""A box that is not closed by then is left to a worker."""
MAX_BOX = 200_000
"""Characters of a box; of a longer one there is no end."""
SHORT_CHARACTERS = 400
"""Of answer and label, whose spellings are compared in some ten microseconds."""

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])")
_BOXES = ("\\boxed", "\\fbox", "\\framebox")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LINES = re.compile(r"[\n{}]")
_BARE = re.compile(r"\s+([^\s$][^$\n]*?)\s*(?=\$|\\[)\]]|\n|\Z|\s[A-Za-z]{2})")
"""What stands behind a box without braces: all to the end of the formula, or to the first word."""


def grade_cheaply(item: Item) -> Graded | Question:
    """The verdict if answer and label are the same text or plain numbers, else the question for a worker."""
    label = read_label(item.label)
    if not label:
        return Graded(Verdict.UNGRADABLE)
    box = find_box(item.response, item.require_think)
    if isinstance(box, Reason):
        return item.scored(box)
    answer = open_box(box[:CHEAP_CHARACTERS])
    if answer is None:
        return Question(box, label) if len(box) > CHEAP_CHARACTERS else item.scored(Reason.NO_ANSWER)
    if not answer.strip():
        return item.scored(Reason.NO_ANSWER)
    if answer == label:
        return item.scored(Reason.CORRECT)
    numbers = read_number(answer), read_number(label)
    if None not in numbers:
        return item.scored(Reason.CORRECT if numbers[0] == numbers[1] else Reason.WRONG)
    if len(answer) + len(label) <= SHORT_CHARACTERS and same_text(answer, label):
        return item.scored(Reason.CORRECT)
    return Question(f"\\boxed{{{answer}}}", label)


def decide(question: Question) -> Graded:
    """Answer a question, within some tens of milliseconds."""
    answer = open_box(question.answer)
    if answer is None or not answer.strip():
        return Graded(Verdict.SCORED, Reason.NO_ANSWER)
    return Graded(Verdict.SCORED, Reason.CORRECT if same(answer, question.label) else Reason.WRONG)


def find_box(response: str, require_think: bool) -> str | Reason:
    """The response from its last box on, or why there is none; a box within unfinished thinking does not count."""
    if "</think>" in response:
        response = response.rpartition("</think>")[2]
    elif "###Response" in response:
        response = response.split("###Response", 2)[1]
    elif require_think or "<think>" in response:
        return Reason.NO_THINK_TAG
    start = max(response.rfind(box) for box in _BOXES)
    if start >= 0:
        return response[start : start + MAX_BOX]
    said = _last_line(response)
    return f"\\boxed{{{said}}}" if said else Reason.NO_ANSWER


def open_box(text: str) -> str | None:
    """What stands inside the box that `text` begins with: `\\boxed{5}` or `\\boxed 5`; None if it is not closed."""
    start = _BOX.match(text)
    if start is None:
        return None
    inside = text[start.end() :].lstrip()
    if not inside.startswith("{"):
        bare = _BARE.match(text, start.end())
        return bare[1].rstrip(".") if bare else None
    depth = 0
    for brace in _BRACE.finditer(inside):
        if brace.group() in "{}":
            depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return inside[1 : brace.start()]
    return None


def _last_line(text: str) -> str:
    """What stands behind `####` at the end, as in the solutions of GSM8K; empty if there is none."""
    return _LINES.split(text[-CHEAP_CHARACTERS:].rstrip())[-1].partition("####")[2].strip()


def read_label(label: str) -> str | None:
    """The label without spaces around it, taken out of its box, or of a last line as in GSM8K, if it has one.

    None if nothing can be graded by it.
    """
    start = max(label.rfind(box) for box in _BOXES)
    if start < 0 and (said := _last_line(label)):
        return said
    inside = open_box(label[start:]) if start >= 0 else label
    return inside and inside.strip()
