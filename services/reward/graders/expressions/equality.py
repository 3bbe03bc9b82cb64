"""Whether two mathematical expressions are equal: exactly where that can be told, else at random points."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

from services.reward.graders.expressions.evaluate import read, read_number
from services.reward.graders.expressions.modular import TooLarge, Undefined, equal_residues
from services.reward.graders.expressions.nodes import CONSTANTS, Node, constant, names
from services.reward.graders.expressions.numeric import DOUBLE, FINE, Evaluation, Imprecise, is_real, total
from services.reward.graders.expressions.tokens import Unreadable

BUDGET = 6_000
"""Of one comparison, in additions of 100 digits: about ten milliseconds."""
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
    except (Unreadable, Undefined, TooLarge, Imprecise):
        return None


def equal_trees(one: Node, other: Node) -> bool | None:
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


def _equal_numerically(one: Node, other: Node, decimal_logarithms: bool) -> bool | None:
    evaluation = Evaluation(BUDGET, decimal_logarithms)
    used = {*names(one), *names(other)}
    unknowns = sorted(used - CONSTANTS)
    if not unknowns:
        return _equal_at(one, other, {}, evaluation, complex_too=True)
    for values, complex_too in ((_REAL, "i" in used), (_WHOLE, "i" in used), (_REAL, True)):
        agreeing = 0
        for point in _points(unknowns, values):
            same = _equal_at(one, other, point, evaluation, complex_too)
            if same is False:
                return False
            agreeing += same is True
        if agreeing >= MIN_POINTS:
            return True
    return None


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


_REAL = ((0.1, 0.9), (1.1, 3.0), (-0.9, 0.9), (4.0, 20.0), (-3.0, 3.0), (-9.0, -1.0))
"""Ranges of the points: inside and outside of the domains of roots, logarithms and inverse functions."""
_WHOLE = ((2, 9), (3, 20), (20, 60), (1, 5))
"""Ranges where powers of -1 and factorials are defined."""


def _points(unknowns: list[str], ranges: Iterable[tuple[float, float]]) -> Iterator[dict[str, Fraction]]:
    """Points that look random, and are the same for the same names."""
    for number, (low, high) in enumerate(ranges):
        shares = {name: Fraction(zlib.crc32(f"{name} {number}".encode()), 1 << 32) for name in unknowns}
        if isinstance(low, int):
            yield {name: Fraction(low + int(share * (high - low + 1))) for name, share in shares.items()}
        else:
            yield {name: Fraction(low) + share * Fraction(high - low) for name, share in shares.items()}
