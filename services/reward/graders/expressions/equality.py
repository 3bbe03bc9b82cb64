"""Whether two mathematical expressions are equal: exactly where that can be told, else at random points."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction

from services.reward.graders.expressions.evaluate import read, read_number
from services.reward.graders.expressions.linear import substitute
from services.reward.graders.expressions.modular import TooLarge, Undefined, equal_residues
from services.reward.graders.expressions.nodes import CONSTANTS, Node, constant, names, number
from services.reward.graders.expressions.numeric import DOUBLE, FINE, Evaluation, Imprecise, is_real, total
from services.reward.graders.expressions.tokens import Unreadable

BUDGET = 6_000
"""Of one comparison, in additions of 100 digits: about ten milliseconds."""
UNDECIDED = (Unreadable, Undefined, TooLarge, Imprecise)
"""What is raised where nothing can be said."""
MAX_UNKNOWNS = 4
LAST_WHOLE = 26
"""Up to there, and at multiples, integer parts are compared exactly."""
MIN_POINTS = 2
"""At fewer points where both sides are defined nothing is decided."""


def equal(answer: str, label: str) -> bool | None:
    """Whether two expressions in LaTeX or plain notation have the same value, as functions of their symbols.

    None if one of them cannot be read, or nothing can be said within the bounds. Symbols stand for real numbers, and
    points where one side is not real, or not defined, do not count. `log` is natural or decimal, but the same in both.
    Takes some ten microseconds for usual answers, 20 ms at most, and raises nothing.
    """
    numbers = read_number(answer), read_number(label)
    if None not in numbers:
        return numbers[0] == numbers[1]
    try:
        return equal_trees(read(answer), read(label))
    except UNDECIDED:
        return None


def equal_trees(one: Node, other: Node) -> bool | None:
    """The same for trees. Raises one of UNDECIDED."""
    if one == other:
        return True
    values = constant(one), constant(other)
    if None not in values:
        return False
    exactly = equal_residues(one, other)
    if exactly is not None:
        return exactly
    verdict = _equal_numerically(one, other, decimal_logarithms=False)
    if not verdict and (_has_logarithm(one) or _has_logarithm(other)):
        return _equal_numerically(one, other, decimal_logarithms=True)
    return verdict


def _has_logarithm(node: Node) -> bool:
    return node.kind == "log" or any(map(_has_logarithm, node.parts))


def _rounds(node: Node) -> bool:
    return node.kind in ("floor", "ceil") or any(map(_rounds, node.parts))


def _bent(node: Node) -> bool:
    """Whether a function is put together from others, as `|x+30|` is, which is `x+30` near 0."""
    root = node.kind == "^" and isinstance(constant(node.parts[1]), Fraction)
    return root or node.kind in ("abs", "floor", "ceil") or any(map(_bent, node.parts))


def _equal_numerically(one: Node, other: Node, decimal_logarithms: bool) -> bool | None:
    evaluation = Evaluation(BUDGET, decimal_logarithms)
    used = {*names(one), *names(other)}
    unknowns = sorted(used - CONSTANTS)
    if not unknowns:
        return _equal_at(one, other, {}, evaluation, complex_too=True)
    if _differ_at_whole_numbers(one, other, unknowns):
        return False
    real = _mixed(_REAL + _FAR, unknowns) if _bent(one) or _bent(other) else _together(_REAL, unknowns)
    whole = _mixed(_WHOLE, unknowns)
    for ranges, complex_too in ((real, "i" in used), (whole, "i" in used), (real, True)):
        agreeing = 0
        evaluation.roots_are_real = not complex_too
        for point in map(_point, range(len(ranges)), ranges):
            same = _equal_at(one, other, point, evaluation, complex_too)
            if (
                same is None
                and ranges is whole
                and len({_defined(node, point, evaluation) for node in (one, other)}) > 1
            ):
                return False
            if same is False:
                return False
            agreeing += same is True
        if agreeing >= MIN_POINTS:
            return True
    return None


def _differ_at_whole_numbers(one: Node, other: Node, unknowns: Sequence[str]) -> bool:
    """Whether expressions with integer parts have different values, exactly computed, at some whole numbers."""
    if len(unknowns) > MAX_UNKNOWNS or not (_rounds(one) or _rounds(other)):
        return False
    for first in range(1, LAST_WHOLE):
        here, there = one, other
        for place, name in enumerate(unknowns):
            value = number(first * (1 + place))
            here, there = substitute(here, name, value), substitute(there, name, value)
        values = constant(here), constant(there)
        if None not in values and values[0] != values[1]:
            return True
    return False


def _equal_at(
    one: Node, other: Node, point: Mapping[str, Fraction], evaluation: Evaluation, complex_too: bool
) -> bool | None:
    """Whether the values at a point are equal; None if one is not defined there, or not real though it should be."""
    for precision in (DOUBLE, FINE):
        try:
            values = [evaluation.value(node, point, precision) for node in (one, other)]
            if not complex_too and not all(map(is_real, values)):
                return None
            return total([values[0], -values[1]], precision) == 0
        except Imprecise:
            continue
        except Undefined:
            return None
    return None


def _defined(node: Node, point: Mapping[str, Fraction], evaluation: Evaluation) -> bool:
    """Whether the expression has a value at a point, as far as is known."""
    try:
        evaluation.value(node, point, FINE)
    except Undefined:
        return False
    except Imprecise:
        pass
    return True


_REAL = ((0.1, 0.9), (1.1, 3.0), (-0.9, 0.9), (4.0, 20.0), (-3.0, 3.0), (-9.0, -1.0))
"""Ranges of the points: inside and outside of the domains of roots, logarithms and inverse functions."""
_FAR = ((0.02, 0.4), (30.0, 300.0), (-300.0, -30.0), (1e4, 9e4), (-9e4, -1e4))
"""Where functions that are put together from others may differ though they agree near 0."""
_WHOLE = (*((low, low) for low in range(1, 11)), (2, 9), (3, 20), (20, 60))
"""Ranges where powers of -1 and factorials are defined."""

Ranges = Mapping[str, tuple[float, float]]
"""Of the values of each symbol."""


def _together(ranges: Sequence[tuple[float, float]], unknowns: Sequence[str]) -> list[Ranges]:
    """The same range for all symbols."""
    return [dict.fromkeys(unknowns, one) for one in ranges]


def _mixed(ranges: Sequence[tuple[float, float]], unknowns: Sequence[str]) -> list[Ranges]:
    """The same range for all symbols, and then different ones."""
    turned = [
        {name: ranges[(number + place * shift) % len(ranges)] for place, name in enumerate(unknowns)}
        for shift in (1, 3)
        for number in range(len(ranges))
    ]
    return _together(ranges, unknowns) + (turned if len(unknowns) > 1 else [])


def _point(number: int, ranges: Ranges) -> dict[str, Fraction]:
    """A point that looks random, and is the same for the same names."""
    point = {}
    for name, (low, high) in ranges.items():
        digest = hashlib.blake2b(f"{name} {number}".encode(), digest_size=4).digest()
        share = Fraction(int.from_bytes(digest), 1 << 32)
        if isinstance(low, int):
            point[name] = Fraction(low + int(share * (high - low + 1)))
        else:
            point[name] = Fraction(low) + share * Fraction(high - low)
    return point
