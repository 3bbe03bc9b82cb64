"""The `dapo` rule: the last line `Answer: ...` of the response, equal to the label once both are normalised.

The rule is that of DAPO's reward (verl's `math_dapo`): the line stands in the last 300 characters, and the
normalisation is Minerva's (Lewkowycz et al. 2022, appendix D.1). Where there is no such line, the last box counts.
DAPO pays 1 and -1: set `[reward.values]` for that.
"""

from __future__ import annotations

import re

from services.reward.graders.deepscaler import BOX, open_box
from services.reward.verdicts import Graded, Item, Question, Reason, Verdict

VERSION = "1"
TAIL_CHARACTERS = 300

_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_SPELLINGS = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km"),
    *("units", "points", "feet", "minutes", "digits", "cents", "degrees", "cm"),
    *("gm", "pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
)
_NOISE = (
    *("\\ldots", "\\dots", "\\text{s}", "\\text{.}", "\\text{}^2", "\\text{}^3", "\\text{}", "\\mathrm{th}"),
    *("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"'),
)
_DOLLARS = re.compile(r"\$([^$]*)\$")
_WRAPPED = re.compile(r"\\(?:text|textbf|overline|boxed)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


def grade_cheaply(item: Item) -> Graded | Question:
    """The verdict; there is nothing to leave to a worker."""
    label = normalize(item.label)
    if not label:
        return Graded(Verdict.UNGRADABLE)
    answer = find_answer(item.response[-TAIL_CHARACTERS:])
    if answer is None:
        return item.scored(Reason.NO_ANSWER)
    return item.scored(Reason.CORRECT if normalize(answer) == label else Reason.WRONG)


def find_answer(tail: str) -> str | None:
    """The text after the last `Answer:`, else in the last box."""
    if lines := _ANSWER_LINE.findall(tail):
        return lines[-1]
    start = tail.rfind(BOX)
    return open_box(tail[start:]) if start >= 0 else None


def normalize(text: str) -> str:
    """Minerva's normalisation of a final answer."""
    text = text.rpartition("=")[2]
    for old, new in _SPELLINGS:
        text = text.replace(old, new)
    for removed in (*_UNITS, *_NOISE):
        text = text.replace(removed, "")
    if between := _DOLLARS.search(text):
        text = between[1]
    text = _WRAPPED.sub(r"\1", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()
