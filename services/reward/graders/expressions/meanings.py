"""What functions, binomial coefficients and numerals mean as trees."""

from __future__ import annotations

import re
from fractions import Fraction

from services.reward.graders.expressions.nodes import (
    IMAGINARY_UNIT,
    MINUS_ONE,
    E,
    Node,
    add,
    call,
    divide,
    integer,
    multiply,
    number,
    power,
)
from services.reward.graders.expressions.tokens import Unreadable

MAX_EXPONENT_DIGITS = 400


def apply(name: str, base: Node | None, operand: Node) -> Node:
    """A function of its operand; the base is that of a logarithm."""
    if base is not None:
        return divide(call("ln", operand), call("ln", base))
    match name:
        case "lg":
            return divide(call("ln", operand), call("ln", number(10)))
        case "exp":
            return power(E, operand)
        case "cis":
            return power(E, multiply((IMAGINARY_UNIT, operand)))
        case "cbrt":
            return power(operand, number(Fraction(1, 3)))
        case "gamma":
            return call("factorial", add((operand, MINUS_ONE)))
        case _:
            return call(name, operand)


_SMALL_BINOMIAL = 20


def binomial(above: Node, below: Node) -> Node:
    """A binomial coefficient; that of an expression over a small integer is written as a polynomial."""
    count = integer(below)
    if count is None or integer(above) is not None or not 0 <= count <= _SMALL_BINOMIAL:
        return call("binomial", above, below)
    falling = multiply(add((above, number(-step))) for step in range(count))
    return divide(falling, call("factorial", below))


_NUMERAL = re.compile(
    r"(?P<whole>\d*)\.?(?P<decimals>\d*)(?:[eE](?P<exponent>[+-]?\d+)|\\[a-z]+\s*\{?(?P<period>\d+)\}?(?:(?P<inner>\d*)\\dot\s*\{?(?P<last>\d)\}?)?)?"
)


def numeral(text: str) -> Node:
    """A number as written. Raises Unreadable if it is none, or its exponent is too large."""
    match = _NUMERAL.fullmatch(text)
    if not match:
        raise Unreadable("a number of unknown form")
    decimals, period = match["decimals"], match["period"]
    value = Fraction(int(match["whole"] + decimals or "0"), 10 ** len(decimals))
    if period:
        if "." not in text:
            raise Unreadable("a period before the decimal point")
        period += (match["inner"] or "") + (match["last"] or "")
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(decimals))
    if not match["exponent"]:
        return number(value)
    if len(match["exponent"]) > MAX_EXPONENT_DIGITS:
        raise Unreadable("a decimal exponent is too large")
    scale = power(number(10), number(int(match["exponent"])))
    return multiply((number(value), scale)) if value else number(0)
