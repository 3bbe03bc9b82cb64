"""Inequalities in one variable, as the set of numbers that satisfy them."""

from __future__ import annotations

import re

from services.reward.graders.expressions.linear import solve
from services.reward.graders.plus.normal import GREATER_EQUAL, IN, LESS_EQUAL, NOT_EQUAL, PLUS_MINUS, REALS, UNION
from services.reward.graders.plus.pieces import split
from services.reward.graders.plus.regions import LINE, Region, both, ray, without

VARIABLE = re.compile(r"(?:[A-Za-z]|\\(?!infty|pi)[a-z]+)(?:_\{?\w+\}?)?'?(?:\([A-Za-z]\))?")
COMPARISON = re.compile("[<>\u2264\u2265\u2260]")
_CLOSED = {"<": False, ">": False, LESS_EQUAL: True, GREATER_EQUAL: True}
_OR = re.compile(rf"\s*(?:,\s*)?\bor\b\s*|\s*{UNION}\s*")
_AND = re.compile(r"\s*(?:,\s*)?\band\b\s*|\s*,\s*")
_ANY_NUMBER = re.compile(rf"[A-Za-z]\s*{IN}\s*{REALS}")
_ABSOLUTE = re.compile(r"\|\s*([^|]+?)\s*\|")
MAX_CONDITIONS = 10


def read_inequalities(text: str) -> Region | None:
    """Inequalities joined by `or`, each of them several joined by `and` or a comma; None if it is anything else."""
    regions = [_conditions(part) for part in split(text, _OR)[0]]
    known = [one for one in regions if one is not None]
    if len(known) < len(regions) or len({one.variable for one in known}) != 1:
        return None
    intervals = tuple(piece for one in known for piece in one.intervals)
    return Region(intervals, tuple(number for one in known for number in one.numbers), known[0].variable)


def _conditions(text: str) -> Region | None:
    """Inequalities that hold together, or one equation."""
    parts, joints = split(text, _AND)
    name, equals, value = text.partition("=")
    if equals:
        return Region((), (value.strip(),), name.strip()) if VARIABLE.fullmatch(name.strip()) and not joints else None
    parts = [part for part in parts if not _ANY_NUMBER.fullmatch(part)]
    chains = [part for part in _spread(parts) if NOT_EQUAL not in part]
    excluded = [_excluded(part) for part in _spread(parts) if NOT_EQUAL in part]
    regions = [_chain(chain) for chain in chains]
    if None in regions or None in excluded or len(parts) > MAX_CONDITIONS or len(regions) > 2:
        return None
    region = _joined([one for one in regions if one], or_either=all("and" not in joint for joint in joints))
    names = {one[0] for one in excluded if one}
    if not names:
        return region
    region = region if regions else Region((LINE,), (), min(names))
    return without(region, [one[1] for one in excluded if one]) if region and names == {region.variable} else None


def _joined(regions: list[Region], or_either: bool) -> Region | None:
    if len(regions) == 2:
        return both(regions[0], regions[1], or_either)
    return regions[0] if regions else None


def _spread(parts: list[str]) -> list[str]:
    """`x \\ne 1, 2` and `x \\ne \\pm 1` are two conditions."""
    if not parts or NOT_EQUAL not in parts[0]:
        return parts
    name = parts[0].partition(NOT_EQUAL)[0]
    parts = [parts[0], *(part if COMPARISON.search(part) else f"{name}{NOT_EQUAL}{part}" for part in parts[1:])]
    signed = [[part.replace(PLUS_MINUS, sign) for sign in "+-"] if PLUS_MINUS in part else [part] for part in parts]
    return [part for both_signs in signed for part in both_signs]


def _excluded(text: str) -> tuple[str, str] | None:
    """The variable and the value of `x \\ne 1`."""
    sides, _ = split(text, COMPARISON)
    return (sides[0], sides[1]) if len(sides) == 2 and VARIABLE.fullmatch(sides[0]) and sides[1] else None


def _chain(text: str) -> Region | None:
    """`a < x`, `x < b`, `a < x < b`, `|x| < b`, in both directions."""
    sides, signs = split(text, COMPARISON)
    if not all(sides) or len(sides) not in (2, 3) or len({sign in ("<", LESS_EQUAL) for sign in signs}) != 1:
        return None
    closed = [_CLOSED[sign] for sign in signs]
    if signs[0] not in ("<", LESS_EQUAL):
        sides.reverse()
        closed.reverse()
    small, large = sides[0], sides[-1]
    if len(sides) == 3:
        return _between(small, sides[1], large, closed[0], closed[1])
    if absolute := _ABSOLUTE.fullmatch(small):
        return _between(f"-({large})", absolute[1], large, closed[0], closed[0])
    if absolute := _ABSOLUTE.fullmatch(large):
        pieces = [_bound(absolute[1], f"-({small})", closed[0]), _bound(small, absolute[1], closed[0])]
        known = [one for one in pieces if one]
        return Region((*known[0].intervals, *known[1].intervals), (), known[0].variable) if len(known) == 2 else None
    return _bound(small, large, closed[0])


def _between(low: str, middle: str, high: str, low_closed: bool, high_closed: bool) -> Region | None:
    lower, upper = _bound(low, middle, low_closed), _bound(middle, high, high_closed)
    return both(lower, upper, or_either=False) if lower and upper else None


def _bound(small: str, large: str, closed: bool) -> Region | None:
    """One inequality, solved for its variable."""
    names = VARIABLE.fullmatch(small), VARIABLE.fullmatch(large)
    if names[0] and not names[1]:
        return ray(small, large, True, closed)
    if names[1] and not names[0]:
        return ray(large, small, False, closed)
    if names[0] or not (solved := solve(small, large)):
        return None
    variable, end, upper = solved
    return ray(variable, str(end), upper, closed)
