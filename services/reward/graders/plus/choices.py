"""Multiple choice: a letter, alone or before the text of its choice."""

from __future__ import annotations

import re

_LABEL = re.compile(r"\(?([A-J])\)?[.:)]?|(?:\(([A-J])\)|([A-J])[.:)]) *[\w$].*", re.DOTALL)
_LEAD = r"(?:(?:option|choice|answer)\s*:?\s*)?"
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_ANSWER = re.compile(rf"{_LEAD}(?:\(([A-J])\)|([A-J])(?=[.:)]|$))[.:)]?\s*(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_MORE = re.compile(r"(?:and|or)\b|[,&+=*/^-]")


def is_choice(label: str) -> bool:
    """Whether a clean label is the letter of a choice."""
    return _LABEL.fullmatch(_TEXT.sub(r"\1", label).strip()) is not None


def same_choice(answer: str, label: str) -> bool:
    """Whether an answer settles on the letter of the label."""
    right = _LABEL.fullmatch(_TEXT.sub(r"\1", label).strip())
    given = _ANSWER.fullmatch(_TEXT.sub(r"\1", answer).strip())
    if not right or not given:
        return False
    return (given[1] or given[2]).upper() == (right[1] or right[2] or right[3]) and not _MORE.match(given["rest"])
