"""Multiple choice: a letter, alone or before the text of its choice."""

from __future__ import annotations

import re

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTER = r"(?:\(([A-J])\)|\(?([A-J])(?:\)|(?=[.:]|$)))"
_REST = r"(?:[.:]?\s*|(?:[.:]?\s+|:|(?=\d))(?P<rest>-?[\w$\\({|\u221a].*))"
_LABEL = re.compile(_LETTER + _REST, re.DOTALL)
_ANSWER = re.compile(rf"(?:(?:option|choice|answer)\s*:?\s*)?{_LETTER}{_REST}", re.IGNORECASE | re.DOTALL)
_DENIED = re.compile(r"(?:and|or|may)\b|is (?:wrong|false|not|incorrect|also|out)\b|(?:not|wrong|false|incorrect)$")
_OTHER = re.compile(r"\([A-J]\)|(?<![\w\\+*/^(-])[A-J](?=[.:)]|$)|\b(?:and|or|be|is) [B-HJ]\b")
"""A second letter, which leaves open what is meant."""


def is_choice(label: str) -> bool:
    """Whether a clean label is the letter of a choice."""
    return _letter(_LABEL, label) is not None


def same_choice(answer: str, label: str) -> bool:
    """Whether an answer settles on the letter of the label."""
    return _letter(_ANSWER, answer) == _letter(_LABEL, label)


def _letter(form: re.Pattern[str], text: str) -> str | None:
    """The letter that a text settles on, whatever its choice says."""
    found = form.fullmatch(_TEXT.sub(r"\1", text).strip())
    rest = found["rest"] or "" if found else ""
    if not found or _DENIED.match(rest) or _OTHER.search(rest):
        return None
    return (found[1] or found[2]).upper()
