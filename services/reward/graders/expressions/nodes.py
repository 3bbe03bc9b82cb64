"""Expressions as trees, whose rational parts are computed while they are built.

A tree is made by `number`, `symbol`, `add`, `multiply`, `power` and `call` only. They compute with fractions, never
with floats, and only while a result stays below MAX_BITS; what would be larger stays a tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

MAX_BITS = 1024
"""A numerator or denominator up to this size is computed, in some microseconds."""
MAX_FACTORIAL = 170
"""Whose factorial has about MAX_BITS."""
MAX_ROOT = 64


class Node(NamedTuple):
    """A part of an expression; two are the same expression as written if they are equal."""

    kind: str
    """`number`, `symbol`, `+`, `*`, `^`, or the name of a function."""
    parts: tuple[Node, ...] = ()
    value: Fraction | int | str | None = None
    """The number, or the name of the symbol."""


def number(value: Fraction | int) -> Node:
    return Node("number", (), value.numerator if value.denominator == 1 else value)


def symbol(name: str) -> Node:
    return Node("symbol", (), name)


ZERO, ONE, MINUS_ONE = number(0), number(1), number(-1)
HALF = number(Fraction(1, 2))
E, IMAGINARY_UNIT = symbol("e"), symbol("i")
CONSTANTS = {"\\pi", "e", "i"}
"""Names with a fixed value; all others stand for any number."""


def constant(node: Node) -> Fraction | int | None:
    """The value of a number; None for everything else."""
    return node.value if node.kind == "number" else None  # pyright: ignore[reportReturnType]


def integer(node: Node) -> int | None:
    """The value of an integer; None for everything else."""
    return node.value if isinstance(node.value, int) else None


def names(node: Node) -> Iterator[str]:
    """The names of the symbols, with repetitions."""
    if isinstance(node.value, str):
        yield node.value
    for part in node.parts:
        yield from names(part)


def add(terms: Iterable[Node]) -> Node:
    return _collect("+", terms, 0)


def multiply(factors: Iterable[Node]) -> Node:
    return _collect("*", factors, 1)


def negate(node: Node) -> Node:
    return multiply((MINUS_ONE, node))


def divide(numerator: Node, denominator: Node) -> Node:
    return multiply((numerator, power(denominator, MINUS_ONE)))


def _collect(kind: str, parts: Iterable[Node], neutral: Fraction | int) -> Node:
    """A sum or product of all parts in which the numbers are taken together."""
    total, rest = neutral, []
    for part in parts:
        value = constant(part)
        if value is None:
            rest.append(part)
            continue
        joined = (total + value if kind == "+" else total * value) if _small(total) and _small(value) else None
        if joined is not None and _small(joined):
            total = joined
        else:
            rest.append(part)
    if total != neutral or not rest:
        rest.insert(0, number(total))
    return rest[0] if len(rest) == 1 else Node(kind, tuple(rest))


def _small(value: Fraction | int) -> bool:
    return max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS


def power(base: Node, exponent: Node) -> Node:
    to, what = constant(exponent), constant(base)
    if to == 1:
        return base
    computed = _power(what, to) if what is not None and to is not None else None
    return computed or Node("^", (base, exponent))


def _power(base: Fraction | int, exponent: Fraction | int) -> Node | None:
    """The power if it is rational, or a rational times i, and small."""
    if base == 0:
        return ZERO if exponent > 0 else None
    if base in (1, -1) and exponent.denominator == 1:
        return number(base if exponent.numerator % 2 else 1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent.numerator) * bits > MAX_BITS or exponent.denominator > MAX_ROOT:
        return None
    if base < 0 and exponent == Fraction(1, 2):
        root = _root(-base, 2)
        return None if root is None else multiply((number(root), IMAGINARY_UNIT))
    root = _root(base, exponent.denominator)
    return None if root is None else number(Fraction(root) ** exponent.numerator)


def _root(value: Fraction | int, degree: int) -> Fraction | int | None:
    """The real root if it is rational; that of a negative number if the degree is odd."""
    if degree == 1:
        return value
    if value < 0:
        root = _root(-value, degree) if degree % 2 else None
        return -root if root is not None else None
    root = Fraction(*(_integer_root(part, degree) for part in value.as_integer_ratio()))
    return root if root**degree == value else None


def _integer_root(value: int, degree: int) -> int:
    """The root of a positive integer, rounded down."""
    if degree == 2:
        return math.isqrt(value)
    root = 1 << -(-value.bit_length() // degree)
    while (better := ((degree - 1) * root + value // root ** (degree - 1)) // degree) < root:
        root = better
    return root


def call(function: str, *arguments: Node) -> Node:
    """A function of its arguments; where it gives a rational number exactly, that number."""
    values = [constant(one) for one in arguments]
    whole = [value for value in values if isinstance(value, int)]
    computed = None
    if function in _ROUNDED and values[0] is not None:
        computed = _ROUNDED[function](values[0])
    elif function == "binomial" and len(whole) == 2 and min(whole) >= 0 and max(whole) <= MAX_FACTORIAL:
        computed = math.comb(*whole)
    elif function in _FACTORIALS and whole and 0 <= whole[0] <= MAX_FACTORIAL:
        computed = math.prod(range(whole[0], 1, -_FACTORIALS[function]))
    return Node(function, arguments) if computed is None else number(computed)


_ROUNDED = {"abs": abs, "floor": math.floor, "ceil": math.ceil}
_FACTORIALS = {"factorial": 1, "double_factorial": 2}
