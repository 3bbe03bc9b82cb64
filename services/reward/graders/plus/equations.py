"""Equations: whether two say the same, and names that only introduce a value."""

from __future__ import annotations

import re

from services.reward.graders.expressions.equality import UNDECIDED, equal_trees
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
from services.reward.graders.plus.pieces import outside

POINT = 3
"""Where signs are compared; any point would do at which both sides of an inequality are defined."""
_GREEK = "alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|varphi|omega|Delta|Omega|ell"
_LETTER = rf"(?:\\(?:{_GREEK})|[A-Za-z])"
_INDEX = r"(?:_\{?\w+\}?|_\{[^{}]*\})?'*"
_ARGUMENTS = r"(?:\(\s*[\w\\]+(?:\s*,\s*[\w\\]+)*\s*\))?"
_OPERATORS = "lim|int|iint|oint|sum|prod|det|dim|gcd|lcm|max|min|sup|inf"
_NAME = re.compile(
    rf"{_LETTER}{_INDEX}(?:\^\{{?-1\}}?)?{_ARGUMENTS}|m?\s*\\angle\s*[A-Z{{}}]+|[A-Z]{{2,4}}"
    rf"|\\(?:overline|vec|overrightarrow|hat|bar|text|mathcal)\s*\{{[^{{}}]*\}}{_INDEX}{_ARGUMENTS}"
    rf"|\\(?:sin|cos|tan)\s*(?:{_LETTER}|\\angle\s*[A-Z]+|\(\s*{_LETTER}\s*\))"
    r"|(?:[PE]|Var|\\text\s*\{[^{}]*\}|\\mathbb\s*\{?[EP]\}?)\s*[(\[][^=]*[)\]]"
    rf"|\\(?:{_OPERATORS})(?![A-Za-z])[^=]*(?:=[^=]*)?"
    r"|\\frac\s*\{\s*(?:d|\\partial)\s*[a-zA-Z]?\s*\}\s*\{\s*(?:d|\\partial)\s*[a-z]\s*\}"
    r"|[A-Z](?:\s*(?:\u222a|\u2216|\\cap)\s*[A-Z])+"
    rf"|\(\s*{_LETTER}{_INDEX}(?:\s*,\s*{_LETTER}{_INDEX})+\s*\)|[|][A-Za-z]+[|]|[A-Za-z]{{3,}}(?: [A-Za-z]+)*"
)
_SIGN = re.compile(r"[+*/]|(?<=[^\s_^{(])\s*-|\\cdot|\\times")
_BRACED = re.compile(r"\{[^{}]*\}")
_NEGATION = re.compile(r"\b(?:not|no)\b", re.IGNORECASE)
_CAPITALS = re.compile(r"[A-Z]+")
_CALLED = re.compile(r"(?<=\w)\([a-z](?:,[a-z])*\)\Z")
_COORDINATE = re.compile(r"\b[xyz]\b|\b[abc]\b")
_FUNCTION = re.compile(r"y|[a-zA-Z]\([a-z]\)")


def is_name(text: str) -> bool:
    """Whether a left side only says what the value is of: `x`, `f(x)`, `\\angle ABC`, `(x,y)`, `Area`."""
    text = text[1:-1].strip() if _BRACED.fullmatch(text) else text
    return _NAME.fullmatch(text) is not None and not _NEGATION.search(text) and not outside(text, _SIGN)


def introduces(name: str, value: str) -> bool:
    """Whether `name = value` gives a name to a value; `AB = AC` rather says that two things are equal."""
    if not is_name(name) or (_CAPITALS.fullmatch(name) and _CAPITALS.fullmatch(value) and len(name) == len(value)):
        return False
    coordinates = _COORDINATE.findall(name) if name[0] == "(" else []
    return coordinates == sorted(coordinates) and _head(name) != _head(value)


def _head(text: str) -> str:
    """The letter of a function of one letter, or the text."""
    return text[0] if _FUNCTION.fullmatch(text.replace("'", "")) else text


def same_name(one: str, other: str) -> bool:
    """Whether two names may stand for the same value; `y` and `f(x)` may."""
    one, other = one.replace(" ", ""), other.replace(" ", "")
    if one == other or _CALLED.sub("", one) == other or _CALLED.sub("", other) == one:
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
    try:
        if any(equal_trees(difference, ZERO) is not False for difference in (here, there)):
            return None
        return equal_trees(multiply((here, _elsewhere(there))), multiply((_elsewhere(here), there)))
    except UNDECIDED:
        return None


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
