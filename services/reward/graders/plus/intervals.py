"""Reading sets of real numbers: intervals, unions, set builders and inequalities."""

from __future__ import annotations

import re

from services.reward.graders.plus.inequalities import COMPARISON, VARIABLE, read_inequalities
from services.reward.graders.plus.normal import ABOUT, EMPTY, IN, REALS, SET_CLOSE, SET_OPEN, UNION, WITHOUT
from services.reward.graders.plus.pieces import in_brackets, split
from services.reward.graders.plus.regions import INFINITY, LINE, MINUS_INFINITY, Interval, Region, without

_UNION = re.compile(rf"\s*(?:{UNION}|(?<=[\])]) ?U ?(?=[\[(]))\s*")
_WITHOUT = re.compile(rf"\s*(?:{WITHOUT}|(?<={REALS})\s*-(?=\s*{SET_OPEN}))\s*")
_COMMA = re.compile(r"\s*,\s*")
_BUILDER = re.compile(
    rf"{SET_OPEN}\s*(?P<name>[A-Za-z])\s*(?:{IN}\s*{REALS}\s*)?[|:]\s*(?P<condition>.*){SET_CLOSE}", re.DOTALL
)
_POSITIVE = {f"{REALS}^+", f"{REALS}^{{+}}", f"{REALS}_+", f"{REALS}_{{+}}", f"{REALS}_{{>0}}"}
_LINE = {
    REALS,
    "all real numbers",
    "all reals",
    "the real numbers",
    *(f"({MINUS_INFINITY},{space}{INFINITY})" for space in ("", " ")),
}


def read_region(text: str) -> Region | None:
    """The set of numbers that a clean text describes; None if it is no union, inequality or the like.

    A lone interval may be a point, so it is none here; `interval` reads it once that is settled.
    """
    if text in _LINE or text.casefold() in _LINE:
        return Region((LINE,))
    if builder := _BUILDER.fullmatch(text):
        text = builder["condition"]
    if not COMPARISON.search(text):
        return _read_sets(text) if IN in text or WITHOUT in text or REALS in text or _UNION.search(text) else None
    return None if ABOUT in text else read_inequalities(text)


def interval(text: str) -> Interval | None:
    """The interval that a text in brackets is."""
    inside = in_brackets(text)
    if inside is None or text[0] not in "([" or text[-1] not in ")]":
        return None
    ends, _ = split(inside, _COMMA)
    return Interval(ends[0], ends[1], text[0] == "[", text[-1] == "]") if len(ends) == 2 and all(ends) else None


def _read_sets(text: str) -> Region | None:
    variable, member, rest = text.rpartition(IN)
    variable = variable.strip()
    if member and not VARIABLE.fullmatch(variable):
        return None
    whole, *removed = split(rest.strip(), _WITHOUT)[0]
    region = _read_union(whole, variable)
    if not removed or region is None:
        return region
    inside = in_brackets(removed[0])
    if len(removed) > 1 or inside is None or removed[0][0] != SET_OPEN:
        return None
    return without(region, split(inside, _COMMA)[0])


def _read_union(text: str, variable: str) -> Region | None:
    intervals, numbers = [], []
    for part in split(text, _UNION)[0]:
        inside = in_brackets(part)
        if part == REALS:
            intervals.append(LINE)
        elif part.replace(" ", "") in _POSITIVE:
            intervals.append(Interval("0", INFINITY))
        elif piece := interval(part):
            intervals.append(piece)
        elif inside is not None and part[0] == SET_OPEN:
            numbers.extend(one for one in split(inside, _COMMA)[0] if one)
        elif part != EMPTY:
            return None
    return Region(tuple(intervals), tuple(numbers), variable)
