"""Answers in words."""

from __future__ import annotations

import re

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_PUNCTUATION = re.compile(r"[\s.,;:!?'\"()]+|(?<=[a-z])-(?=[a-z])")
_ORDINAL = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b")
_ARTICLES = {"a", "an", "the"}
_MONTH_NAMES = """
january february march april may june july august september october november december
jan feb mar apr jun jul aug sep sept oct nov dec
"""
_MONTHS = frozenset(_MONTH_NAMES.split())
_SHORT = {"no", "up", "in", "on", "ok"}
_SYNONYMS = {
    **dict.fromkeys(("does not exist", "doesn t exist", "dne"), "does not exist"),
    **dict.fromkeys(("no solution", "no solutions"), "no solution"),
    **dict.fromkeys(("no real solution", "no real solutions"), "no real solution"),
}


def same_phrase(one: str, other: str) -> bool:
    """Whether two answers are the same words, whatever their case and punctuation; formulas are no words."""
    words = _words(one), _words(other)
    if not words[0] or not words[1]:
        return False
    if words[0] == words[1]:
        return True
    return not _MONTHS.isdisjoint(words[0]) and sorted(words[0]) == sorted(words[1])


def _words(text: str) -> list[str] | None:
    """The words of a phrase; None if it is a formula."""
    text = _TEXT.sub(r" \1 ", text)
    if any(sign in text for sign in "\\^_={}<>"):
        return None
    words = _PUNCTUATION.sub(" ", _ORDINAL.sub(r"\1", text.casefold())).strip()
    listed = [word for word in _SYNONYMS.get(words, words).split() if word not in _ARTICLES]
    return listed if any((len(word) > 2 or word in _SHORT) and word.isalpha() for word in listed) else None
