"""Answers in words."""

from __future__ import annotations

import re

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_PUNCTUATION = re.compile(r"(?<!\d)[.,;:!?'\"`)]+(?!\d)|[(](?!\d)|[.,;](?=\s|$)|(?<=[a-z])-(?=[a-z])")
"""What is next to a digit may be part of a number."""
_ORDINAL = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b")
_ARTICLE = re.compile(r"\b(?:a|an|the)(?=\s)|^\s*(?:A|An|The)(?=\s)|(?<=\s)The(?=\s)")
_MONTH_NAMES = """
january february march april may june july august september october november december
"""
_MONTHS = {short: name for name in _MONTH_NAMES.split() for short in (name, name[:3], name[:4])}
_VERB = r"\b(?:is|are|was|were|has|have|makes|earns|costs|pays|needs|gets|takes|equals)\b"
_INTRODUCTION = re.compile(
    r"(?P<macro>\\text\s*\{\s*)?(?P<words>(?(macro)[A-Za-z]|[A-Z])[A-Za-z]{2,}(?:[ ',-]+[A-Za-z]+){0,9})\s*"
    rf"(?::|{_VERB})\s*(?(macro)\}})\s*(?=\S)"
)
_LIMITING = re.compile(
    r"\b(?:not|no|nor|or|never|least|most|than|about|around|approximately|roughly|nearly|except|if|either|maybe|wrong"
    r"|none|nobody|nothing|neither|without|half|twice|thrice|double|triple|square|cube|root|negative|opposite|inverse"
    r"|reciprocal|error|hint|yes|true|false|under|over|between|below|above)\b",
    re.IGNORECASE,
)
MAX_NUMBERS_OF_DATE = 2
_TRUTHS = {"true", "false", "t", "f", "yes", "no"}
_SHORT = {"no", "up", "in", "on", "ok"}
_SYNONYMS = {
    **dict.fromkeys(("does not exist", "doesn t exist", "dne"), "does not exist"),
    **dict.fromkeys(("no solution", "no solutions"), "no solution"),
    **dict.fromkeys(("no real solution", "no real solutions"), "no real solution"),
}


def without_introduction(text: str) -> str:
    """What follows `Total:` or `The equation is`, unless those words deny or weaken it."""
    found = _INTRODUCTION.match(text)
    if not found or _LIMITING.search(found["words"]):
        return text
    return text[found.end() :]


def is_truth(text: str) -> bool:
    """Whether a text is one of the two answers to a question; lists of those have an order."""
    return _TEXT.sub(r"\1", text).strip().casefold() in _TRUTHS


def same_phrase(one: str, other: str) -> bool:
    """Whether two answers are the same words, whatever their case and punctuation; formulas are no words."""
    words = _words(one), _words(other)
    if not words[0] or not words[1]:
        return False
    if words[0] == words[1]:
        return True
    return _is_date(words[0]) and sorted(_full_months(words[0])) == sorted(_full_months(words[1]))


def _full_months(words: list[str]) -> list[str]:
    return [_MONTHS.get(word, word) for word in words]


def _is_date(words: list[str]) -> bool:
    """Whether the words are one date, whose parts stand in different orders."""
    return sum(word in _MONTHS for word in words) == 1 and sum(map(str.isdecimal, words)) <= MAX_NUMBERS_OF_DATE


def _words(text: str) -> list[str] | None:
    """The words of a phrase; None if it is a formula."""
    text = _ARTICLE.sub(" ", _TEXT.sub(r" \1 ", text))
    if any(sign in text for sign in "\\^_={}<>"):
        return None
    words = _PUNCTUATION.sub(" ", _ORDINAL.sub(r"\1", text.casefold())).strip()
    listed = _SYNONYMS.get(words, words).split()
    return listed if any((len(word) > 2 or word in _SHORT) and word.isalpha() for word in listed) else None
