"""Values of expressions modulo a prime: exact equality of numbers of any size, and of rational functions.

Symbols get random values, so that two rational functions that differ have different values but for a chance of about
2**-61 times their degree. What is no rational operation (a root, a sine, a power with an unknown exponent) becomes an
unknown of its own, determined by the values of its arguments: equal values still mean equal expressions, but different
ones no longer mean different expressions.
"""

from __future__ import annotations

import zlib
from fractions import Fraction

from services.reward.graders.expressions.nodes import Node, integer

PRIMES = (2305843009213693921, 2305843009213693669)
"""Just below 2**61 and one more than a multiple of four, so that -1 has a root."""
_ROOTS_OF_MINUS_ONE = {
    prime: next(root for base in range(2, 99) if (root := pow(base, prime // 4, prime)) ** 2 % prime == prime - 1)
    for prime in PRIMES
}
MAX_STEPS = 10_000
"""Multiplications for factorials and binomials: a millisecond or two."""
NEAR_FACTORIALS = 2000
"""The quotient of the factorials of two numbers is computed up to this difference, be they as large as they may."""


class Undefined(ValueError):
    """The expression has no value, such as 1/0."""


class TooLarge(ValueError):
    """A bound on the work is exceeded."""


class Residues:
    """Evaluates expressions modulo one prime, all with the same values of the symbols."""

    def __init__(self, prime: int) -> None:
        self._prime = prime
        self._steps = 0
        self._factorials: dict[int, int] = {}
        self.rational = True
        """All that was evaluated so far were rational functions of the symbols, pi, e and i."""

    def value(self, node: Node) -> int:
        """Raises Undefined or TooLarge."""
        match node.kind:
            case "number":
                return self._fraction(node.value)
            case "symbol":
                return self._symbol(str(node.value))
            case "+":
                return sum(map(self.value, node.parts)) % self._prime
            case "*":
                product = 1
                for part in node.parts:
                    product = product * self.value(part) % self._prime
                return product
            case "^":
                return self._power(*node.parts)
            case _:
                return self._call(node)

    def _symbol(self, name: str) -> int:
        return _ROOTS_OF_MINUS_ONE[self._prime] if name == "i" else self._unknown(zlib.crc32(name.encode()))

    def _fraction(self, value: object) -> int:
        assert isinstance(value, Fraction | int)
        above = value.numerator % self._prime
        return above if value.denominator == 1 else above * self._inverse(value.denominator) % self._prime

    def _inverse(self, value: int) -> int:
        if value % self._prime == 0:
            raise Undefined("division by zero")
        return pow(value, -1, self._prime)

    def _unknown(self, *key: int) -> int:
        return hash((self._prime, *key)) % self._prime  # of integers: the same in every process

    def _other(self, node: Node) -> int:
        self.rational = False
        return self._unknown(zlib.crc32(node.kind.encode()), *map(self.value, node.parts))

    def _power(self, base: Node, exponent: Node) -> int:
        to = integer(exponent)
        if to is None:
            return self._other(Node("^", (base, exponent)))
        value = self.value(base)
        if to <= 0:
            value = self._inverse(value)
        return pow(value, abs(to) % (self._prime - 1), self._prime)

    def _call(self, node: Node) -> int:
        whole = [integer(part) for part in node.parts]
        if node.kind == "factorial" and whole[0] is not None and whole[0] >= 0:
            return self._factorial(whole[0])
        if node.kind == "binomial" and whole[0] is not None and whole[1] is not None and 0 <= whole[1] <= whole[0]:
            above, below = whole[0], min(whole[1], whole[0] - whole[1])
            return self._product(above - below, above) * self._inverse(self._product(0, below)) % self._prime
        return self._other(node)

    def _factorial(self, number: int) -> int:
        if number not in self._factorials:
            near = [one for one in self._factorials if abs(one - number) <= NEAR_FACTORIALS]
            if not near and number <= NEAR_FACTORIALS:
                value = self._product(0, number)
            elif not near:
                self.rational = False
                value = self._unknown(zlib.crc32(b"factorial"), number)
            elif near[0] < number:
                value = self._factorials[near[0]] * self._product(near[0], number)
            else:
                value = self._factorials[near[0]] * self._inverse(self._product(number, near[0]))
            self._factorials[number] = value % self._prime
        return self._factorials[number]

    def _product(self, above: int, to: int) -> int:
        """The product of the integers after `above` up to `to`."""
        self._steps += to - above
        if self._steps > MAX_STEPS:
            raise TooLarge("too large a factorial or binomial coefficient")
        product = 1
        for factor in range(above + 1, to + 1):
            product = product * factor % self._prime
        return product


def equal_residues(one: Node, other: Node) -> bool | None:
    """Whether two expressions are equal; None if this cannot tell. Raises Undefined or TooLarge."""
    for prime in PRIMES:
        residues = Residues(prime)
        if residues.value(one) != residues.value(other):
            return False if residues.rational else None
    return True
