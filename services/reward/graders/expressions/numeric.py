"""Values of expressions as real or complex numbers, which know when they are not to be trusted.

The same evaluation runs in double precision, which finds most differences, and with 100 digits. Wherever digits are
lost (terms that almost cancel, terms too small to be seen, extreme arguments) it raises Imprecise instead of going on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath
from mpmath.libmp import NoConvergence

from services.reward.graders.expressions.modular import TooLarge, Undefined
from services.reward.graders.expressions.nodes import Node, constant, integer


class Imprecise(ValueError):
    """The precision does not suffice for a value that can be trusted."""


@dataclass(frozen=True, slots=True)
class Precision:
    """One way to compute. The bounds are relative."""

    context: Any
    """Of mpmath: its numbers and functions."""
    cost: int
    """Of a function, in additions."""
    vanishes: float
    """A sum this small, compared with its largest term, is 0; negative if none can be trusted to be."""
    cancels: float
    """A sum smaller than this, but not as small as that, has lost its digits."""
    invisible: float
    """A term this small gets lost in a sum."""
    largest: float
    """Argument of a function, or exponent; its inverse is the smallest."""


def _precise(digits: int) -> Any:
    context = mpmath.MPContext()  # pyright: ignore[reportAttributeAccessIssue]
    context.dps = digits
    return context


DOUBLE = Precision(mpmath.fp, 1, -1.0, 1e-6, 0.0, 1e6)  # pyright: ignore[reportAttributeAccessIssue]
FINE = Precision(_precise(100), 20, 1e-80, 1e-40, 1e-45, 1e12)

_NAMES = {"ln": "log", "abs": "fabs", "double_factorial": "fac2"}
"""Of mpmath's functions, where they are not ours."""
_FINE_ONLY = {"asinh", "acosh", "atanh", "acoth", "asech", "acsch"}
_SLOW = {"factorial", "double_factorial", "binomial", "zeta"}
MAX_EXACT_BITS = 330
"""Of numbers that are not rounded in the finer precision."""
_LARGEST_ZETA = 200
"""From here on it differs too little from 1."""
_SLOW_FACTOR = 10
_LARGEST_SLOW = 1e5
_SATURATED = 30
"""From here on a hyperbolic function differs too little from its limit."""


class Evaluation:
    """Computes values until its budget, in additions, is used up."""

    def __init__(self, budget: int, decimal_logarithms: bool) -> None:
        self._budget = budget
        self._decimal = decimal_logarithms
        self.roots_are_real = False
        """A root of a negative number is not defined, though its square may be."""

    def value(self, node: Node, point: Mapping[str, Fraction], precision: Precision) -> Any:
        """Raises Imprecise, Undefined, or TooLarge if the budget does not suffice."""
        try:
            return self._value(node, point, precision)
        except (Imprecise, Undefined, TooLarge):
            raise
        except OverflowError as error:
            raise Imprecise(str(error)) from error
        except (ArithmeticError, ValueError, NotImplementedError, NoConvergence) as error:
            raise Undefined(str(error)) from error

    def _spend(self, cost: int) -> None:
        self._budget -= cost
        if self._budget < 0:
            raise TooLarge("too long a computation")

    def _value(self, node: Node, point: Mapping[str, Fraction], at: Precision) -> Any:
        self._spend(1)
        match node.kind:
            case "number":
                return _number(constant(node) or 0, at)
            case "symbol":
                return _symbol(str(node.value), point, at)
            case "+":
                return total([self._value(part, point, at) for part in node.parts], at)
            case "*":
                return _product([self._value(part, point, at) for part in node.parts])
            case "^":
                base, exponent = node.parts
                return self._power(base, exponent, point, at)
            case _:
                return self._call(node.kind, [self._value(part, point, at) for part in node.parts], at)

    def _power(self, base: Node, exponent: Node, point: Mapping[str, Fraction], at: Precision) -> Any:
        self._spend(at.cost)
        if base.value == "e" and base.kind == "symbol":
            return _known(at.context.exp(_bounded(self._value(exponent, point, at), at)))
        value, whole, root = self._value(base, point, at), integer(exponent), constant(exponent)
        if whole is not None:
            _bounded(float(whole) if abs(whole) < 1 << 99 else math.inf, at)
            if value == 0 and whole <= 0:
                raise Undefined("a power of zero")
            return _visible(value**whole, value)
        if value == 0:
            if root is not None and root > 0:
                return value
            raise Undefined("a power of zero")
        if root is not None and root.denominator % 2 and is_real(value) and _real(value) < 0:
            inner = at.context.power(-_real(value), _number(root, at))
            return -inner if root.numerator % 2 else inner
        if self.roots_are_real and root is not None and is_real(value) and _real(value) < 0:
            raise Undefined("a root of a negative number")
        to = _number(root, at) if root is not None else _bounded(self._value(exponent, point, at), at)
        return _visible(_known(at.context.power(value, to)), value)

    def _call(self, name: str, arguments: list[Any], at: Precision) -> Any:
        self._spend(at.cost * (_SLOW_FACTOR if name in _SLOW else 1))
        for one in arguments:
            if name not in ("ln", "log", "abs"):
                _bounded(one, at)
            if name == "zeta" and abs(one) > _LARGEST_ZETA:
                raise Imprecise("too large an argument")
            if (name in _SLOW and abs(one) > _LARGEST_SLOW) or (name.endswith("h") and abs(one) > _SATURATED):
                raise Imprecise("too large an argument")
        if name == "apply":
            function, argument = arguments
            return at.context.cos(function * (argument + 1)) + function * argument  # as good as any unknown function
        if name in ("floor", "ceil"):
            return _rounded(name, arguments[0], at)
        if at is DOUBLE and name in _FINE_ONLY:
            raise Imprecise("a function that is missing in this precision")
        result = _known(getattr(at.context, _NAMES.get(name, name))(*arguments))
        if name == "log" and self._decimal:
            result /= at.context.log(10)
        small = abs(result) < 1e-12 if at is DOUBLE else abs(result) < at.vanishes
        return _at_zero(result, arguments, at) if small and name[0] != "a" else result


def _number(value: Fraction | int, at: Precision) -> Any:
    if at is FINE and max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_EXACT_BITS:
        raise Imprecise("a number of too many digits")
    return _visible(at.context.mpf(value.numerator) / value.denominator, value)


def _symbol(name: str, point: Mapping[str, Fraction], at: Precision) -> Any:
    match name:
        case "\\pi":
            return +at.context.pi
        case "e":
            return +at.context.e
        case "i":
            return at.context.mpc(0, 1)
        case _:
            return _number(point[name], at)


def total(terms: list[Any], at: Precision) -> Any:
    """The sum. Raises Imprecise if it, or one of the terms, lost its digits."""
    result = at.context.mpf(0)
    for term in terms:
        result = result + term
    _known(result)
    largest = max(map(abs, terms))
    if at.invisible and any(term != 0 and abs(term) < largest * at.invisible for term in terms):
        raise Imprecise("a term is lost in a sum")
    if abs(result) <= largest * at.vanishes:
        return at.context.mpf(0)
    if abs(result) < largest * at.cancels:
        raise Imprecise("the terms of a sum cancel")
    return result


def _product(factors: list[Any]) -> Any:
    result = factors[0]
    for factor in factors[1:]:
        vanishes = result == 0 or factor == 0
        result = result * factor if vanishes else _visible(result * factor, factor)
    return _known(result)


def _visible(result: Any, source: Any) -> Any:
    if result == 0 and source != 0:
        raise Imprecise("a value is too small")
    return _known(result)


def _known(value: Any) -> Any:
    """The value, unless it is infinite or undefined."""
    if value != value:
        raise Imprecise("not a number")
    if abs(value) == math.inf:
        raise Undefined("infinite")
    return value


def _bounded(value: Any, at: Precision) -> Any:
    size = abs(value)
    if size > at.largest or 0 < size < 1 / at.largest:
        raise Imprecise("an extreme argument")
    return value


def _at_zero(result: Any, arguments: list[Any], at: Precision) -> Any:
    """A function next to one of its zeros is at it, if the precision says so."""
    if result == 0 or abs(result) > 0.5 * abs(arguments[0]):
        return result
    if at is DOUBLE:
        raise Imprecise("next to a zero")
    return at.context.mpf(0)


def _rounded(name: str, value: Any, at: Precision) -> Any:
    if not is_real(value):
        raise Undefined("a complex number has no integer part")
    value = _real(value)
    if abs(value - at.context.floor(value + 0.5)) < (1e-6 if at is DOUBLE else at.cancels):
        raise Imprecise("next to an integer")
    return at.context.floor(value) if name == "floor" else at.context.ceil(value)


def is_real(value: Any) -> bool:
    """Whether a value is real, up to an imaginary part that comes from rounding."""
    imaginary = getattr(value, "imag", 0)
    return imaginary == 0 or abs(imaginary) < 1e-12 * abs(value)


def _real(value: Any) -> Any:
    return value.real if hasattr(value, "real") else value
