"""Equations: whether two say the same, and names that only introduce a value."""

from __future__ import annotations

import re

from services.reward.graders.expressions.equality import equal_trees
from services.reward.graders.expressions.evaluate import read
from services.reward.graders.expressions.linear import substitute
from services.reward.graders.expressions.nodes import (
    CONSTANTS,
    ZERO,
    Node,
    add,
    constant,
    multiply,
    names,
    negate,
    number,
)
from services.reward.graders.expressions.tokens import Unreadable

POINT = 3
"""Where signs are compared; any point would do at which both sides of an inequality are defined."""
_GREEK = "alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|varphi|omega|Delta|Omega|ell"
_LETTER = rf"(?:\\(?:{_GREEK})|[A-Za-z])"
_INDEX = r"(?:_\{?\w+\}?|_\{[^{}]*\})?'*"
_ARGUMENTS = r"(?:\(\s*[\w\\]+(?:\s*,\s*[\w\\]+)*\s*\))?"
_NAME = re.compile(
    rf"{_LETTER}{_INDEX}(?:\^\{{?-1\}}?)?{_ARGUMENTS}|m?\s*\\angle\s*[A-Z{{}}]+|[A-Z]{{2,4}}"
    rf"|\\(?:overline|vec|hat|bar|text|mathcal)\s*\{{[^{{}}]*\}}{_INDEX}{_ARGUMENTS}"
    rf"|\(\s*{_LETTER}{_INDEX}(?:\s*,\s*{_LETTER}{_INDEX})+\s*\)|[|][A-Za-z]+[|]|[A-Za-z]{{3,}}(?: [A-Za-z]+)*"
)
_FUNCTION = re.compile(r"y|[a-zA-Z]\([a-z]\)")


def is_name(text: str) -> bool:
    """Whether a left side only says what the value is of: `x`, `f(x)`, `\\angle ABC`, `(x,y)`, `Area`."""
    return _NAME.fullmatch(text) is not None


def introduces(name: str, value: str) -> bool:
    """Whether `name = value` gives a name to a value; `A = B` rather says that two things are equal."""
    return is_name(name) and not (len(name) == len(value) == 1 and name.isupper() and value.isupper())


def same_name(one: str, other: str) -> bool:
    """Whether two names may stand for the same value; `y` and `f(x)` may."""
    one, other = one.replace(" ", ""), other.replace(" ", "")
    if one == other:
        return True
    return "y" in (one, other) and bool(_FUNCTION.fullmatch(one) and _FUNCTION.fullmatch(other))


def same_equation(one: tuple[str, ...], other: tuple[str, ...]) -> bool | None:
    """Whether the differences of the sides of two equations are the same but for a constant factor.

    The factor is constant if the differences, one taken at x and the other at an independent x', have the same product
    with x and x' exchanged.
    """
    trees = _differences(one, other)
    if not trees:
        return None
    here, there = trees
    if any(equal_trees(difference, ZERO) is not False for difference in (here, there)):
        return None
    return equal_trees(multiply((here, _elsewhere(there))), multiply((_elsewhere(here), there)))


def _differences(one: tuple[str, ...], other: tuple[str, ...]) -> list[Node] | None:
    try:
        return [add((read(left), negate(read(right)))) for left, right in (one, other)]
    except Unreadable:
        return None


def same_side(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether `left < right` says the same in two inequalities; their differences must have rational values."""
    trees = _differences(one, other)
    if not trees or not same_equation(one, other):
        return False
    for place, name in enumerate(sorted({*names(trees[0]), *names(trees[1])} - CONSTANTS)):
        trees = [substitute(tree, name, number(POINT + place**2)) for tree in trees]
    values = [constant(tree) for tree in trees]
    return values[0] is not None and values[1] is not None and values[0] * values[1] > 0


def _elsewhere(node: Node) -> Node:
    """The same expression in other variables."""
    if node.kind == "symbol" and node.value not in CONSTANTS:
        return Node("symbol", (), f"{node.value} elsewhere")
    return Node(node.kind, tuple(map(_elsewhere, node.parts)), node.value)
