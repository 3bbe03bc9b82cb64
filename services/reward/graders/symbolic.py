"""Is an expression that a model wrote equal to zero? Read without `eval`, and within bounds.

sympy's own transformations turn the text into tokens (implicit products, factorials, symbols of one letter), as
`sympy.parse_expr` does. Where that evaluates the result as Python, this module walks its syntax tree, in which only
arithmetic, numbers, symbols and a short list of functions are allowed, and looks at sizes before it computes anything.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any

import sympy
from sympy.parsing.sympy_parser import (
    implicit_multiplication_application,
    standard_transformations,
    stringify_expr,
)

MAX_CHARACTERS = 4000
MAX_DEPTH = 100
MAX_NODES = 5000
MAX_POWER_BITS = 1 << 20
"""Size of an integer power, in bits: computed in a millisecond, printed in ten."""
MAX_FACTORIAL = 100_000
MAX_DECIMAL_EXPONENT = 5000
MIN_DIFFERENCE = 1e-6
_POINT = sympy.Rational(12345, 6789)

_TRANSFORMATIONS = (*standard_transformations, implicit_multiplication_application)
_NAMES = {name: getattr(sympy, name) for name in sympy.__all__}
"""What the transformations take for a known name; it is never called from here."""
_CONSTANTS = {name: _NAMES[name] for name in ("pi", "oo", "nan", "zoo", "I")}
_FUNCTIONS = {name: _NAMES[name] for name in ("Integer", "Rational", "sqrt", "ln", "re", "im", "li", "frac")}
_FACTORIALS = {name: _NAMES[name] for name in ("factorial", "factorial2", "ff", "rf")}
_DECIMAL = re.compile(r"[0-9_]*\.?[0-9_]*(?:[eE][+-]?(?P<exponent>[0-9]+))?")


class Refused(ValueError):
    """The text is no expression, or one that is too large to compute."""


def is_zero(text: str) -> bool:
    """True if sympy simplifies the expression to 0. Raises Refused, or whatever sympy raises on what it cannot do."""
    expression = parse(text)
    return not _differs_from_zero(expression) and bool(sympy.simplify(expression) == 0)


def _differs_from_zero(expression: Any) -> bool:
    """Whether the value at a point says so beyond doubt, in a tenth of the time that simplifying takes."""
    if not isinstance(expression, sympy.Expr) or expression.has(sympy.Float):
        return False
    names = sorted(expression.free_symbols, key=str)
    try:
        value = abs(complex(expression.evalf(subs={name: _POINT + index for index, name in enumerate(names)})))
    except Exception:  # noqa: BLE001  of sympy's many kinds: there is no value to tell by
        return False
    return MIN_DIFFERENCE < value < math.inf


def parse(text: str) -> Any:
    """Build the sympy expression of a text in the notation of Python with implicit products; `^` is a power.

    Raises:
        Refused: It is too long, nests too deeply, contains anything but arithmetic, or a step would be too large.
        SyntaxError, tokenize.TokenError: It is malformed.
    """
    if len(text) > MAX_CHARACTERS or _depth(text) > MAX_DEPTH:
        raise Refused("too long or nested too deeply")
    code = stringify_expr(text.replace("^", "**"), {}, _NAMES, _TRANSFORMATIONS)
    tree = ast.parse(code.strip(), mode="eval")
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise Refused("too many terms")
    return _build(tree.body)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]":
            depth -= 1
    return deepest


def _build(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int()):
            return node.value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _build(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_build(left), _build(right))
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() as text)], keywords=[]):
            return _from_text(name, text)
        case ast.Call(func=function, args=arguments, keywords=[]):
            return _call(function, [_build(one) for one in arguments])
        case _:
            raise Refused(f"{type(node).__name__} is not arithmetic")


def _from_text(kind: str, text: str) -> Any:
    """What the transformations write as a name with a string: symbols, undefined functions, decimals, digits.

    Nothing else may take a string, since sympy would evaluate it.
    """
    if kind == "Symbol":
        return sympy.Symbol(text)
    if kind == "Function":
        return sympy.Function(text)
    if kind == "Number" and text.isdecimal():
        return sympy.Integer(text)
    if kind == "Float" and (decimal := _DECIMAL.fullmatch(text)):
        if int((decimal["exponent"] or "0")[:9]) > MAX_DECIMAL_EXPONENT:
            raise Refused("a decimal exponent is too large")
        return sympy.Float(text)
    raise Refused(f"{kind} of a string")


def _call(function: ast.expr, arguments: list[Any]) -> Any:
    match function:
        case ast.Name(id=name) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*arguments)
        case ast.Name(id=name) if name in _FACTORIALS:
            if any(abs(one) > MAX_FACTORIAL for one in arguments if getattr(one, "is_number", False)):
                raise Refused("a factorial is too large")
            return _FACTORIALS[name](*arguments)
        case ast.Call(func=ast.Name(id="Function")):
            return _build(function)(*arguments)
        case _:
            raise Refused("a call of something that is not a known function")


def _power(base: Any, exponent: Any) -> Any:
    if getattr(exponent, "is_Rational", False) and getattr(base, "is_Rational", False):
        bits = max(int(base.p).bit_length(), int(base.q).bit_length())
        if abs(exponent) * bits > MAX_POWER_BITS and bits > 1:
            raise Refused("a power is too large")
    return base**exponent


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Pow: _power,
}
