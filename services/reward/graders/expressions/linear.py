"""Solving linear inequalities in one variable with rational coefficients."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from services.reward.graders.expressions.evaluate import read
from services.reward.graders.expressions.nodes import (
    CONSTANTS,
    Node,
    add,
    call,
    constant,
    multiply,
    names,
    negate,
    number,
    power,
)
from services.reward.graders.expressions.tokens import Unreadable


def solve(small: str, large: str) -> tuple[str, Fraction, bool] | None:
    """What `small < large` says: the variable, its bound, and whether that is an upper bound; None if not linear."""
    try:
        difference = add((read(small), negate(read(large))))
    except Unreadable:
        return None
    unknowns = {*names(difference)} - CONSTANTS
    if len(unknowns) != 1:
        return None
    name = unknowns.pop()
    values = [constant(substitute(difference, name, number(point))) for point in range(4)]
    known = [Fraction(value) for value in values if value is not None]
    slopes = {after - before for before, after in pairwise(known)}
    if len(known) < len(values) or len(slopes) != 1 or 0 in slopes:
        return None
    slope = slopes.pop()
    return name, -known[0] / slope, slope > 0


def substitute(node: Node, name: str, value: Node) -> Node:
    """The expression with a value in place of a symbol."""
    if node.kind == "symbol":
        return value if node.value == name else node
    parts = [substitute(part, name, value) for part in node.parts]
    match node.kind:
        case "number":
            return node
        case "+":
            return add(parts)
        case "*":
            return multiply(parts)
        case "^":
            return power(*parts)
        case _:
            return call(node.kind, *parts)
