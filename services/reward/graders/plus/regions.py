"""Sets of real numbers: intervals and unions of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from services.reward.graders.expressions.evaluate import rational

INFINITY = "\\infty"
MINUS_INFINITY = f"-{INFINITY}"
MAX_NUMBERS = 20


@dataclass(frozen=True, slots=True)
class Interval:
    """From `low` to `high`, both texts; an end belongs to it if it is closed."""

    low: str
    high: str
    low_closed: bool = False
    high_closed: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """A union of intervals and of single numbers."""

    intervals: tuple[Interval, ...]
    numbers: tuple[str, ...] = ()
    variable: str = ""
    """That an inequality speaks of; empty where it is not said."""


LINE = Interval(MINUS_INFINITY, INFINITY)


def without(region: Region, numbers: Sequence[str]) -> Region | None:
    """A region without some numbers; None if it is not known where they lie."""
    if region.intervals == (LINE,) and len(numbers) == 1:
        return replace(region, intervals=_cut(LINE, numbers[0]))
    values = {number: rational(number) for number in numbers[:MAX_NUMBERS]}
    if len(numbers) > MAX_NUMBERS or None in values.values():
        return None
    pieces = list(region.intervals)
    for number in numbers:
        left = [_left_of(piece, number, values[number]) for piece in pieces]
        if None in left:
            return None
        pieces = [piece for parts in left for piece in parts or ()]
    return replace(region, intervals=tuple(pieces))


def _cut(piece: Interval, number: str) -> tuple[Interval, Interval]:
    return replace(piece, high=number, high_closed=False), replace(piece, low=number, low_closed=False)


def _left_of(piece: Interval, number: str, value: Fraction | None) -> Sequence[Interval] | None:
    """What is left of an interval without a number; None if an end is not rational."""
    low, high = rational(piece.low), rational(piece.high)
    if value is None or (low is None and piece.low != MINUS_INFINITY) or (high is None and piece.high != INFINITY):
        return None
    if value in (low, high):
        low_closed, high_closed = piece.low_closed and value != low, piece.high_closed and value != high
        return (replace(piece, low_closed=low_closed, high_closed=high_closed),)
    inside = (low is None or low < value) and (high is None or value < high)
    return _cut(piece, number) if inside else (piece,)


def both(one: Region, other: Region, or_either: bool) -> Region | None:
    """What lies in both of two rays in opposite directions; None for other regions.

    If nothing does, it is what lies in either if that is allowed, as in `x < -1, x > 1`.
    """
    if one.variable != other.variable or len(one.intervals) != 1 or len(other.intervals) != 1:
        return None
    pieces = one.intervals[0], other.intervals[0]
    lower = [piece for piece in pieces if piece.high == INFINITY and piece.low != MINUS_INFINITY]
    upper = [piece for piece in pieces if piece.high != INFINITY and piece.low == MINUS_INFINITY]
    if len(lower) != 1 or len(upper) != 1:
        return None
    ends = rational(lower[0].low), rational(upper[0].high)
    if ends[0] is not None and ends[1] is not None and ends[0] >= ends[1]:
        return Region(pieces, (), one.variable) if or_either else None
    return Region((Interval(lower[0].low, upper[0].high, lower[0].low_closed, upper[0].high_closed),), (), one.variable)


def ray(variable: str, end: str, upper: bool, closed: bool) -> Region:
    """All numbers up to an end, or from it on."""
    piece = Interval(MINUS_INFINITY, end, False, closed) if upper else Interval(end, INFINITY, closed, False)
    return Region((piece,), (), variable)
