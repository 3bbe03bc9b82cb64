"""Expressions and rational numbers out of text; the usual short ones without the parser."""

from __future__ import annotations

import re
from fractions import Fraction

from services.reward.graders.expressions.nodes import Node, constant, number
from services.reward.graders.expressions.parser import parse
from services.reward.graders.expressions.tokens import Unreadable

_NUMBER = re.compile(
    r"(?:(?P<minus>[-\u2212])\s*)?(?:(?P<whole>\d{1,40})(?:\.(?P<decimals>\d{1,40})|/(?P<below>\d{1,40}))?"
    r"|\\[dtc]?frac\s*(?:\{\s*(?P<above>\d{1,40})\s*\}\s*\{\s*(?P<under>\d{1,40})\s*\}|(?P<digits>\d\d)))",
    re.ASCII,
)
_TERM = re.compile(
    r"\s*([-+])?\s*(?:(\d{1,18})|\\[dtc]?frac\s*\{\s*(\d{1,18})\s*\}\s*\{\s*(\d{1,18})\s*\})\s*", re.ASCII
)
MAX_DENOMINATOR = 10**30
MAX_SUM_CHARACTERS = 200_000


def read_number(text: str) -> Fraction | int | None:
    """The value of an integer, a decimal or a simple fraction, in a microsecond or two; None for everything else."""
    match = _NUMBER.fullmatch(text.strip())
    if not match:
        return None
    minus, whole, decimals, below, above, under, digits = match.groups()
    if decimals:
        value = Fraction(int(whole + decimals), 10 ** len(decimals))
    elif below or under or digits:
        divisor = int(below or under or digits[1])
        if divisor == 0:
            return None
        value = Fraction(int(whole or above or digits[0]), divisor)
    else:
        value = int(whole)
    return -value if minus else value


def read(text: str) -> Node:
    """The tree of an expression. Raises Unreadable."""
    value = read_number(text)
    return parse(text) if value is None else number(value)


def long_sum(text: str) -> Fraction | int | None:
    """The value of integers and fractions with signs between them, be they ever so many; None for any other text.

    Takes a microsecond a term; sums whose denominators grow beyond a bound are None too.
    """
    total, at = 0, 0
    if len(text) > MAX_SUM_CHARACTERS:
        return None
    for term in _TERM.finditer(text):
        sign, whole, above, below = term.groups()
        if (
            term.start() != at
            or (at and not sign)
            or (below and int(below) == 0)
            or total.denominator > MAX_DENOMINATOR
        ):
            return None
        value = int(whole) if whole else Fraction(int(above), int(below))
        total += -value if sign == "-" else value
        at = term.end()
    return total if at and at == len(text) else None


def rational(text: str) -> Fraction | None:
    """The exact value of an expression if it is a rational number that can be computed within the bounds, else None.

    Decimals are exact: 0.333 is not a third. Raises nothing.
    """
    try:
        value = constant(read(text))
    except Unreadable:
        return None
    return None if value is None else Fraction(value)
