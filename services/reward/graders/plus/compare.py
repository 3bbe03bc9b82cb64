"""Whether an answer is what the label says: by its text, else by what kind of thing the label is.

The label decides how the answer is read. An answer that says more than the label, or leaves a choice, is wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

from services.reward.graders.expressions.equality import equal
from services.reward.graders.expressions.evaluate import long_sum, rational
from services.reward.graders.plus.assignments import assignments, sides, without_name
from services.reward.graders.plus.choices import is_choice, same_choice
from services.reward.graders.plus.equations import introduces, is_name, same_equation, same_name
from services.reward.graders.plus.inequalities import COMPARISON
from services.reward.graders.plus.intervals import interval
from services.reward.graders.plus.normal import PLUS_MINUS, clean, key
from services.reward.graders.plus.numbers import same_numeral, same_quantity, same_time
from services.reward.graders.plus.numerals import Based, Time
from services.reward.graders.plus.phrases import is_truth, same_phrase, without_introduction
from services.reward.graders.plus.reading import (
    Equation,
    Listing,
    Matrix,
    Ordered,
    Ratio,
    Value,
    is_grouped,
    read,
)
from services.reward.graders.plus.regions import Interval, Region
from services.reward.graders.plus.relations import same_relation
from services.reward.graders.plus.systems import Congruence, same_congruence
from services.reward.graders.plus.units import Quantity

MAX_CHARACTERS = 4000
"""Longer texts are right only if they are the label, or a sum of numbers."""
MAX_DEPTH = 4
MAX_COMPARISONS = 100
"""Of parts that are not the same text, in one answer."""


def same(answer: str, label: str) -> bool:
    """Whether the answer is right. Both are texts as they stand in their boxes. Bounded; raises nothing."""
    answer, label = " ".join(answer.split()), " ".join(label.split())
    if answer == label:
        return bool(label)
    if len(answer) + len(label) > MAX_CHARACTERS:
        return len(label) <= MAX_CHARACTERS and _same_sum(answer, label)
    answer, label = clean(answer), clean(label)
    if key(answer) == key(label):
        return bool(label)
    if not answer:
        return False
    if is_choice(label):
        return same_choice(answer, label)
    if _Comparison().same(answer, label):
        return True
    said, label_said = without_introduction(answer), without_introduction(label)
    if (said != answer) != (label_said != label) and _Comparison().same(said, label_said):
        return True
    return is_grouped(answer) and not is_grouped(label) and _Comparison().same(answer, label, grouped=False)


def _same_sum(answer: str, label: str) -> bool:
    value = long_sum(answer)
    return value is not None and value == rational(clean(label))


def same_text(answer: str, label: str) -> bool:
    """Whether answer and label differ in nothing but their spelling."""
    answer, label = key(clean(answer)), key(clean(label))
    return answer == label != ""


class _Comparison:
    """Compares parts until a bound is reached."""

    def __init__(self) -> None:
        self._left = MAX_COMPARISONS
        self._depth = 0

    def same(self, answer: str, label: str, grouped: bool = True) -> bool:
        if key(answer) == key(label):
            return True
        if _different_integers(answer, label):
            return False
        self._left -= 1
        if self._left < 0 or self._depth >= MAX_DEPTH:
            return False
        self._depth += 1
        verdict = self._same_values(read(answer, grouped), read(label, grouped))
        verdict = verdict or same_relation(answer, label, self.same) or same_phrase(answer, label)
        self._depth -= 1
        return verdict

    def _same_values(self, one: Value, other: Value) -> bool:
        for kind, compare in self._BY_KIND:
            if isinstance(other, kind):
                return compare(self, other, one)
            if isinstance(one, kind):
                return compare(self, one, other)
        return False

    # ---------------------------------------------------------------------------------------------- names and equations

    def _equations(self, equation: Equation, other: Value) -> bool:
        if not isinstance(other, Equation):
            return self._named(equation, other)
        mine, others = equation.sides, other.sides
        if len(mine) != 2 or len(others) != 2:
            return self._match(mine, others)
        if is_name(mine[0]) and is_name(others[0]) and same_name(mine[0], others[0]) and self.same(mine[1], others[1]):
            return True
        return same_equation(mine, others) is True

    def _named(self, equation: Equation, other: Value) -> bool:
        """A chain of equal sides, of which the first may be a name, for a value: all must be that value."""
        values = equation.sides[1:] if introduces(equation.sides[0], equation.sides[1]) else equation.sides
        return all(values) and all(self._same_values(read(value), other) for value in values)

    # ----------------------------------------------------------------------------------------------------- collections

    def _listings(self, listing: Listing, other: Value) -> bool:
        if isinstance(other, Listing):
            return self._same_lists(listing, other)
        if isinstance(other, Ordered):
            values = list(assignments(listing.items).values())
            if values and other.brackets == "()" and self._all_same(values, other.items):
                return True
        items = self._spread(listing.items)
        if isinstance(other, Region) and not other.intervals:
            return self._match(items, other.numbers)
        if isinstance(other, Matrix) or len(items) != 1 or self._depth > 1:
            return False
        return self._same_values(read(items[0]), other)

    def _spread(self, items: Sequence[str]) -> list[str]:
        """The items, with both values of those that have two, and without the name that all are values of."""
        spread: list[str] = []
        for item in without_name(items):
            value = read(item) if PLUS_MINUS in item else None
            spread.extend(value.items if isinstance(value, Listing) else (item,))
        return spread

    def _same_lists(self, one: Listing, other: Listing) -> bool:
        mine, others = assignments(one.items), assignments(other.items)
        if len(mine) > 1 and not sides(other.items):
            return self._all_same(list(mine.values()), other.items)
        if len(others) > 1 and not sides(one.items):
            return self._all_same(one.items, list(others.values()))
        if len(mine) > 1 or len(others) > 1:
            return mine.keys() == others.keys() and all(self.same(mine[name], others[name]) for name in mine)
        if one.joined and other.joined and one.joined != other.joined and COMPARISON.search("".join(one.items)):
            return False
        if all(map(is_truth, one.items + other.items)):
            return self._all_same(one.items, other.items)
        return self._match(self._spread(one.items), self._spread(other.items))

    def _ordered(self, one: Ordered, other: Value) -> bool:
        if isinstance(other, Ordered):
            return one.brackets == other.brackets and self._all_same(one.items, other.items)
        if isinstance(other, Region) and len(other.intervals) == 1 and not other.numbers:
            mine = interval(f"{one.brackets[0]}{','.join(one.items)}{one.brackets[1]}")
            return mine is not None and self._same_interval(mine, other.intervals[0])
        if isinstance(other, Matrix) and one.brackets == "()":
            cells = [cell for row in other.rows for cell in row]
            return 1 in (len(other.rows), len(other.rows[0])) and self._all_same(one.items, cells)
        if isinstance(other, Matrix):
            rows = [read(item) for item in one.items]
            return len(rows) == len(other.rows) and all(
                isinstance(mine, Ordered) and mine.brackets == "[]" and self._all_same(mine.items, its)
                for mine, its in zip(rows, other.rows, strict=True)
            )
        if one.brackets == "()" and isinstance(other, Quantity) and (point := _POINT.fullmatch(other.number)):
            return self._same_values(one, read(point[1]))
        return (
            len(one.items) == 1
            and one.brackets == "[]"
            and isinstance(other, Quantity)
            and self.same(one.items[0], other.number)
        )

    def _all_same(self, one: Sequence[str], other: Sequence[str]) -> bool:
        return len(one) == len(other) and all(self.same(*pair) for pair in zip(one, other, strict=True))

    def _match(self, one: Sequence[str], other: Sequence[str]) -> bool:
        """Whether the items are the same in some order."""
        if len(one) != len(other):
            return False
        here, there = Counter(map(key, one)), Counter(map(key, other))
        rest = list((there - here).elements())
        if len(rest) > MAX_COMPARISONS:
            return False
        for item in (here - there).elements():
            found = next((index for index, candidate in enumerate(rest) if self.same(item, candidate)), None)
            if found is None:
                return False
            del rest[found]
        return True

    def _matrices(self, one: Matrix, other: Value) -> bool:
        if not isinstance(other, Matrix) or len(one.rows) != len(other.rows):
            return False
        return all(self._all_same(*rows) for rows in zip(one.rows, other.rows, strict=True))

    # ---------------------------------------------------------------------------------------------------------- regions

    def _regions(self, one: Region, other: Value) -> bool:
        if not isinstance(other, Region) or (one.variable and other.variable and one.variable != other.variable):
            return False
        if len(one.intervals) != len(other.intervals) or not self._match(one.numbers, other.numbers):
            return False
        rest = list(other.intervals)
        for piece in one.intervals:
            found = next((index for index, other in enumerate(rest) if self._same_interval(piece, other)), None)
            if found is None:
                return False
            del rest[found]
        return True

    def _same_interval(self, one: Interval, other: Interval) -> bool:
        if (one.low_closed, one.high_closed) != (other.low_closed, other.high_closed):
            return False
        return self.same(one.low, other.low) and self.same(one.high, other.high)

    def _ratios(self, one: Ratio, other: Value) -> bool:
        if isinstance(other, Ratio):
            return self._all_same(one.terms, other.terms)
        if not isinstance(other, Quantity) or other.unit or len(one.terms) != 2:
            return False
        return equal(f"({one.terms[0]})/({one.terms[1]})", other.number) is True

    def _congruences(self, one: Congruence, other: Value) -> bool:
        if isinstance(other, Congruence):
            return same_congruence(one, other)
        reduced = not one.name and equal(f"\\lfloor({one.residue})/({one.modulus})\\rfloor", "0") is True
        return reduced and isinstance(other, Quantity) and self.same(one.residue, other.number)

    _BY_KIND: ClassVar[Sequence[tuple[type, Callable[..., bool]]]] = (
        (Equation, _equations),
        (Listing, _listings),
        (Ordered, _ordered),
        (Matrix, _matrices),
        (Region, _regions),
        (Congruence, _congruences),
        (Based, lambda _, one, other: same_numeral(one, other)),
        (Time, lambda _, one, other: same_time(one, other)),
        (Ratio, _ratios),
        (Quantity, lambda _, one, other: same_quantity(one, other)),
    )
    """The first kind that one of the two is says how they are compared."""


_POINT = re.compile(r"[ABDEFMOPQRST]\s*(\(.*\))")
"""A point with its name; other letters in front of brackets are distributions or numbers of combinations."""
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,60})", re.ASCII)


def _different_integers(one: str, other: str) -> bool:
    """Integers as they are usually written are equal only if their texts are."""
    return bool(_INTEGER.fullmatch(one) and _INTEGER.fullmatch(other))
