"""The `gpqa` rule for multiple choice: the letter that the response settles on, against the right one.

The right letter is `metadata.correct_letter`, else the label, which is a letter or the text of one of
`metadata.choices`. The letter of the response is looked for after the thinking, in this order: in the last box, after
the last "answer", "option" or "choice", as all there is, and as the text of a choice.
"""

from __future__ import annotations

import re
from string import ascii_uppercase

from services.reward.graders.deepscaler import BOX, open_box
from services.reward.verdicts import Graded, Item, Question, Reason, Verdict

VERSION = "1"
TAIL_CHARACTERS = 4000
"""An answer stands at the end."""
DEFAULT_CHOICES = 4

_LETTER = re.compile(r"(?:[^\w\\]|\\(?!text))*+(?:\\text\w*\{)?\W*+([A-Za-z])\W*+")
_NAMED = re.compile(r"\b(?i:answer|option|choice)\b(?i:\s+is)?[\s:*$({\\]*(?:text\w*\{)?\(?([A-Z])\b(?![-'])")


def grade_cheaply(item: Item) -> Graded | Question:
    """The verdict; there is nothing to leave to a worker."""
    given = item.metadata.get("choices") or []
    if not isinstance(given, list) or len(given) > len(ascii_uppercase):
        return Graded(Verdict.UNGRADABLE)
    choices = [str(one) for one in given]
    letters = ascii_uppercase[: len(choices) or DEFAULT_CHOICES]
    right = _letter(str(item.metadata.get("correct_letter") or item.label), letters, choices)
    if right is None:
        return Graded(Verdict.UNGRADABLE)
    answer = find_letter(item.response.rpartition("</think>")[2][-TAIL_CHARACTERS:], letters, choices)
    if answer is None:
        return item.scored(Reason.NO_ANSWER)
    return item.scored(Reason.CORRECT if answer == right else Reason.WRONG)


def find_letter(text: str, letters: str, choices: list[str]) -> str | None:
    """The letter that the text settles on; None if it names none of `letters`."""
    start = text.rfind(BOX)
    if start >= 0 and (box := open_box(text[start:])):
        return _letter(box, letters, choices)
    named = [letter for letter in _NAMED.findall(text) if letter in letters]
    return named[-1] if named else _letter(text, letters, choices)


def _letter(text: str, letters: str, choices: list[str]) -> str | None:
    whole = _LETTER.fullmatch(text.strip())
    if whole and whole[1].upper() in letters:
        return whole[1].upper()
    plain = [_plain(one) for one in choices]
    return letters[plain.index(_plain(text))] if _plain(text) in plain else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .")
