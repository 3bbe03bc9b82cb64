"""Times of the day, and numerals with a base."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Based:
    """A numeral with its base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Time:
    hours: int
    minutes: str
    half: str
    """`am`, `pm`, or empty if it is not said."""


_TIME = re.compile(
    r"(?P<hours>\d{1,2})\s*(?::\s*(?P<minutes>\d\d)\s*|(?=[ap]))(?:(?P<half>[ap])\.?\s*m\.?|(?P<noon>noon))?",
    re.IGNORECASE,
)
_SPOKEN = {"noon": Time(12, "00", "pm"), "midnight": Time(12, "00", "am")}
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_BASED = re.compile(
    r"\(?(?P<digits>[0-9A-Z]+)\)?\s*(?:_\s*\{?\s*(?:\\text\s*\{)?\s*\(?(?:base\s*\}?)?|(?:\\text\s*\{)?\s*\(?\s*base\s*\}?)"
    r"\s*(?P<base>\d{1,2}|[a-z]+)\)?\s*\}?\s*\}?"
)
_BASE_NAMES = """
two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
"""
_BASES = _BASE_NAMES.split()
LARGEST_BASE = 36


def read_time(text: str) -> Time | None:
    """The time that `3:30 pm`, `3 pm` or `noon` is; None for any other text."""
    if text.casefold() in _SPOKEN:
        return _SPOKEN[text.casefold()]
    if ":" not in text and text.rstrip(".} ")[-1:] not in ("m", "M"):
        return None
    found = _TIME.fullmatch(_TEXT.sub(r"\1", text).strip())
    if not found:
        return None
    half = f"{found['half']}m".lower() if found["half"] else "pm" if found["noon"] else ""
    return Time(int(found["hours"]), found["minutes"] or "00", half)


def read_based(text: str) -> Based | None:
    """The numeral in `101_2` or `101 base 2`; None for any other text, such as the symbol `A_2`."""
    found = _BASED.fullmatch(text) if "_" in text or "base" in text else None
    base = _base(found["base"]) if found else None
    if not found or not base or not found["digits"][0].isdigit():
        return None
    return Based(found["digits"], base)


def _base(text: str) -> int | None:
    if text.isdecimal():
        return int(text) if 2 <= int(text) <= LARGEST_BASE else None
    return _BASES.index(text) + 2 if text in _BASES else None
