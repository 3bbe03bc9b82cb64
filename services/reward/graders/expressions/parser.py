"""Mathematical text as an expression tree, by recursive descent within bounds.

Conventions where notation is ambiguous: products and quotients go from left to right (`1/2x` is half of x), an integer
before a proper fraction is a mixed number, `^12` is a power of twelve, a function without brackets takes the factors
up to the next sign, bracket or function, and a letter before brackets is a factor, unless it is f or g.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import ClassVar

from services.reward.graders.expressions.meanings import apply, binomial, numeral
from services.reward.graders.expressions.nodes import (
    HALF,
    MINUS_ONE,
    Node,
    add,
    call,
    divide,
    integer,
    multiply,
    negate,
    number,
    power,
    symbol,
)
from services.reward.graders.expressions.tokens import Token, Unreadable, tokenize
from services.reward.graders.expressions.vocabulary import TRIGONOMETRIC

MAX_DEPTH = 60

_END = Token("end", "")
_INVERTIBLE = set(TRIGONOMETRIC)
_FUNCTION_LETTERS = set("fgFG")
_GREEK_FUNCTIONS = (
    "phi",
    "Phi",
    "psi",
    "Psi",
    "sigma",
    "tau",
    "mu",
    "chi",
    "omega",
    "theta",
    "Lambda",
    "Omega",
    "Theta",
)
_OF_ONE = {*"hPQO", *(f"\\{name}" for name in _GREEK_FUNCTIONS)}
"""Letters that are functions before a single number or letter in brackets."""


def parse(text: str) -> Node:
    """Read one expression. Raises Unreadable if it is none, or exceeds a bound."""
    tokens = tokenize(text)
    if any(token.text == "\\infty" for token in tokens) and len(tokens) > 1 + (tokens[0].kind == "sign"):
        raise Unreadable("infinity is no number")
    reader = _Parser(tokens)
    tree = reader.expression()
    if reader.token == Token("sign", "\\over"):
        reader.take()
        tree = divide(tree, reader.expression())
    if reader.token is not _END:
        raise Unreadable("something is left after the expression")
    return tree


class _Parser:
    """One token at a time; every method moves to the right and raises Unreadable where it cannot go on."""

    def __init__(self, tokens: list[Token]) -> None:
        self._rest = [_END, *reversed(tokens)]
        self._depth = 0
        self._bars = 0
        self.token = self._rest.pop()

    def take(self) -> Token:
        taken = self.token
        self.token = self._rest.pop() if self._rest else _END
        return taken

    def _is(self, kind: str, *texts: str) -> bool:
        return self.token.kind == kind and (not texts or self.token.text in texts)

    def _deeper(self, read: Callable[[], Node]) -> Node:
        if self._depth >= MAX_DEPTH:
            raise Unreadable("nested too deeply")
        self._depth += 1
        node = read()
        self._depth -= 1
        return node

    # ------------------------------------------------------------------------------------------- sums and products

    def expression(self) -> Node:
        terms = [self._term()]
        while self._is("sign", "+", "-"):
            terms.append(self._term())
        return add(terms)

    def _minus(self) -> bool:
        """Take all signs that stand here; whether they make a minus."""
        minus = False
        while self._is("sign", "+", "-"):
            minus ^= self.take().text == "-"
        return minus

    def _term(self) -> Node:
        factors = [MINUS_ONE] if self._minus() else []
        factors.append(self._factor_or_mixed())
        while True:
            if self._is("sign", "*", "/"):
                invert = self.take().text == "/"
                minus = self._minus()
                factor = self._factor() if invert else self._factor_or_mixed()
                factors.append(power(factor, MINUS_ONE) if invert else factor)
                factors.extend([MINUS_ONE] if minus else [])
            elif self._starts_factor():
                factors.append(self._factor_or_mixed())
            else:
                return multiply(factors)

    def _starts_factor(self) -> bool:
        return self.token.kind in ("number", "name", "function", "macro", "open") or (
            self._is("sign", "|") and not self._bars
        )

    def _factor_or_mixed(self) -> Node:
        """A factor; an integer with a proper fraction behind it is their sum."""
        before, left = self.token, len(self._rest)
        factor = self._factor()
        if before.kind != "number" or len(self._rest) < left - 1:
            return factor
        if self._is("macro", "frac") and before.text.isdecimal() and integer(factor) == int(before.text):
            return self._mixed(factor, self._factor())
        if not self._is("number"):
            return factor
        return self._mixed_in_a_line(before, factor)

    def _mixed(self, whole: Node, fraction: Node) -> Node:
        value = fraction.value
        proper = isinstance(value, Fraction) and 0 < value < 1
        return add((whole, fraction)) if proper else multiply((whole, fraction))

    def _mixed_in_a_line(self, whole: Token, factor: Node) -> Node:
        """`7 3/4`; other numbers side by side have no meaning."""
        above, slash, below = self.take(), self.take(), self.take()
        integers = all(one.kind == "number" and one.text.isdecimal() for one in (whole, above, below))
        if not (above.spaced and slash.text == "/" and integers) or self._is("sign", "^", "!"):
            raise Unreadable("two numbers side by side")
        if not 0 < int(above.text) < int(below.text):
            raise Unreadable("a mixed number whose fraction is not proper")
        return add((factor, number(Fraction(int(above.text), int(below.text)))))

    # ------------------------------------------------------------------------------------ factors, powers, factorials

    def _factor(self) -> Node:
        base = self._factorials(self._deeper(self._primary))
        if self._is("sign", "^"):
            self.take()
            return self._factorials(power(base, self._deeper(self._exponent)))
        return base

    def _factorials(self, node: Node) -> Node:
        count = 0
        while self._is("sign", "!"):
            self.take()
            count += 1
        if count > 2:
            raise Unreadable("a factorial of a kind that nobody uses")
        return call(("", "factorial", "double_factorial")[count], node) if count else node

    def _exponent(self) -> Node:
        """A group, or with its sign a single factor; powers of powers go from the right."""
        braces = self._is("open", "{")
        minus = self._minus()
        node = self._deeper(self._primary) if braces else self._factorials(self._deeper(self._primary))
        if self._is("sign", "^"):
            self.take()
            node = power(node, self._deeper(self._exponent))
        return negate(node) if minus else node

    def _primary(self) -> Node:
        token = self.take()
        match token.kind:
            case "number":
                return numeral(token.text)
            case "name":
                return self._name(token.text)
            case "open":
                return self._bracketed(token.text)
            case "macro":
                return self._MACROS[token.text](self)
            case "function":
                return self._function(token.text)
            case "sign" if token.text == "|":
                return self._between_bars()
            case _:
                raise Unreadable("an operand is missing")

    def _name(self, name: str) -> Node:
        """A symbol; one before brackets is a factor of its own, unless functions are called so."""
        if self._is("open", "(") and (name[0] in _FUNCTION_LETTERS or name[-1] == "'" or self._called(name)):
            return call("apply", symbol(name), self._deeper(self._primary))
        return symbol(name)

    def _called(self, name: str) -> bool:
        """Whether `(0)` comes next, since y(0) is the value of a function; for some letters also `(1)` or `(x)`."""
        if len(self._rest) < 2 or self._rest[-2] != Token("close", "("):
            return False
        return self._rest[-1].text == "0" or (name in _OF_ONE and self._rest[-1].kind in ("number", "name"))

    def _bracketed(self, bracket: str) -> Node:
        bars, self._bars = self._bars, 0
        inside = self.expression()
        if bracket == "{" and self._is("sign", "\\over", "\\choose"):
            join = divide if self.take().text == "\\over" else binomial
            inside = join(inside, self.expression())
        closing = self.take()
        if closing.text != bracket or closing.kind == "open" or (closing.kind == "sign" and bracket != "|"):
            raise Unreadable("brackets do not match")
        self._bars = bars
        if bracket == "|":
            return call("abs", inside)
        return call(bracket, inside) if bracket in ("floor", "ceil") else inside

    def _between_bars(self) -> Node:
        self._bars += 1
        inside = self.expression()
        if self.take().text != "|":
            raise Unreadable("bars do not match")
        self._bars -= 1
        return call("abs", inside)

    # ----------------------------------------------------------------------------------------- macros and functions

    def _argument(self, digits: int = 1) -> Node:
        """What a macro takes: a group, or a single digit, letter or macro. A root takes all digits."""
        if not self._is("number") or digits == 0:
            return self._deeper(self._primary)
        text = self.take().text
        if not text.isdecimal():
            raise Unreadable("a macro before a decimal")
        if len(text) > 1:
            self._rest.append(self.token)
            self.token = Token("number", text[1:])
        return number(int(text[0]))

    def _fraction(self) -> Node:
        return divide(self._argument(), self._argument())

    def _choose(self) -> Node:
        return binomial(self._argument(), self._argument())

    def _root(self) -> Node:
        exponent = HALF
        if self._is("open", "["):
            self.take()
            exponent = power(self._deeper(lambda: self._bracketed("[")), MINUS_ONE)
        return power(self._argument(digits=0), exponent)

    _MACROS: ClassVar[dict[str, Callable[[_Parser], Node]]] = {"frac": _fraction, "binom": _choose, "sqrt": _root}

    def _function(self, name: str) -> Node:
        base = exponent = None
        if self._is("sign", "_"):
            self.take()
            base = self._deeper(self._primary)
        if self._is("sign", "^"):
            self.take()
            exponent = self._deeper(self._exponent)
        if exponent == MINUS_ONE and name in _INVERTIBLE:
            name, exponent = f"a{name}", None
        value = apply(name, base, self._operand())
        return value if exponent is None else power(value, exponent)

    def _operand(self) -> Node:
        """What a function is applied to: brackets, or the factors that follow."""
        if self._is("open"):
            return self._deeper(self._primary)
        if self._is("sign", "+"):
            raise Unreadable("a function of nothing")
        minus = self._minus()
        factors = [self._factor_or_mixed()]
        while self.token.kind in ("number", "name", "macro") and not self._exponential():
            factors.append(self._factor_or_mixed())
        return multiply([MINUS_ONE, *factors] if minus else factors)

    def _exponential(self) -> bool:
        return self._is("name", "e") and bool(self._rest) and self._rest[-1] == Token("sign", "^")
