"""Arithmetic word problems of one or two steps, worked answers, drill sheets, and what of them is held out.

The split is over *sums*, not over problems. A sum is a pair of operands under + or -; its side is a hash of the
operation and of the sorted pair, so that 12+7 and 7+12 fall on the same side. One sum in eight is held out: no training
problem has it as a step, and no worked answer or drill sheet shows it, not even as a teacher's mistake. Every held-out
problem has at least one. Times tables are too small to split. All is a function of the random generator that comes in.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random

LARGEST_OPERAND = 50
HELD_OUT_ONE_IN = 8

NAMES = (
    "Ann",
    "Ben",
    "Carl",
    "Dana",
    "Eve",
    "Finn",
    "Gina",
    "Hugo",
    "Iris",
    "Jack",
    "Kim",
    "Leo",
    "Mia",
    "Nora",
    "Omar",
)
THINGS = ("apples", "books", "cards", "coins", "eggs", "keys", "marbles", "nuts", "pens", "plums", "shells", "stamps")
HOLDERS = ("bags", "boxes", "baskets", "jars", "shelves", "trays")


class Split(Enum):
    """Which sums a problem may have."""

    TRAINING = "training"
    HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Kind:
    """A shape of problem: what is computed, and how it is told."""

    name: str
    operations: str
    """One of + - * for each step, applied from left to right."""
    phrasings: tuple[str, ...]
    """Templates over name, other, things, holders and the operands a, b, c."""
    draw: Callable[[Random], tuple[int, ...]]
    """Draws the operands; every intermediate result is positive."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One word problem; its answer is `operands` joined by the operations of its kind, from left to right."""

    kind: Kind
    operands: tuple[int, ...]
    text: str

    @property
    def answer(self) -> int:
        """The right answer."""
        return self.sums()[-1].result

    def sums(self) -> list[Sum]:
        """The sums of a right solution, in order."""
        value, sums = self.operands[0], []
        for operation, operand in zip(self.kind.operations, self.operands[1:], strict=True):
            sums.append(Sum(value, operation, operand))
            value = sums[-1].result
        return sums

    def split(self) -> Split:
        """The side on which the problem falls."""
        return Split.HELD_OUT if any(one.held_out for one in self.sums()) else Split.TRAINING


@dataclass(frozen=True, slots=True)
class Sum:
    """Two operands and what is done with them."""

    left: int
    operation: str
    right: int

    @property
    def result(self) -> int:
        """Its right result."""
        match self.operation:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case _:
                return self.left * self.right

    @property
    def held_out(self) -> bool:
        """True for the sums that no training material contains."""
        low, high = sorted((self.left, self.right))
        return self.operation != "*" and zlib.crc32(f"{low}{self.operation}{high}".encode()) % HELD_OUT_ONE_IN == 0


def _two_addends(random: Random) -> tuple[int, ...]:
    return random.randint(2, LARGEST_OPERAND), random.randint(2, LARGEST_OPERAND)


def _difference(random: Random) -> tuple[int, ...]:
    start = random.randint(5, LARGEST_OPERAND)
    return start, random.randint(2, start - 1)


def _product(random: Random) -> tuple[int, ...]:
    return random.randint(2, 5), random.randint(2, 12)


def _add_then_subtract(random: Random) -> tuple[int, ...]:
    first, second = _two_addends(random)
    return first, second, random.randint(2, min(LARGEST_OPERAND, first + second - 1))


def _multiply_then_add(random: Random) -> tuple[int, ...]:
    return random.randint(2, 5), random.randint(2, 9), random.randint(2, LARGEST_OPERAND)


def _subtract_twice(random: Random) -> tuple[int, ...]:
    start = random.randint(8, LARGEST_OPERAND)
    first = random.randint(2, start - 4)
    return start, first, random.randint(2, start - first - 1)


ONE_STEP = (
    Kind(
        "add",
        "+",
        (
            "{name} has {a} {things} and buys {b} more. How many {things} does {name} have?",
            "There are {a} {things} on the table. {name} adds {b} {things}. How many {things} are there?",
            "{name} finds {a} {things} today and {b} {things} the next day. How many {things} does {name} find?",
        ),
        _two_addends,
    ),
    Kind(
        "sub",
        "-",
        (
            "{name} has {a} {things} and gives {b} to {other}. How many {things} does {name} have left?",
            "There are {a} {things} on the table. {name} takes {b} {things}. How many {things} are left?",
            "{name} had {a} {things} and lost {b} of them. How many {things} does {name} have now?",
        ),
        _difference,
    ),
    Kind(
        "mul",
        "*",
        (
            "There are {a} {holders} with {b} {things} in each. How many {things} are there?",
            "{name} buys {a} {holders} of {things}. Each holds {b} {things}. How many {things} does {name} buy?",
        ),
        _product,
    ),
    Kind(
        "more",
        "+",
        ("{name} has {a} {things}. {other} has {b} more {things} than {name}. How many {things} does {other} have?",),
        _two_addends,
    ),
    Kind(
        "fewer",
        "-",
        ("{name} has {a} {things}. {other} has {b} fewer {things} than {name}. How many {things} does {other} have?",),
        _difference,
    ),
)
TWO_STEP = (
    Kind(
        "addsub",
        "+-",
        (
            "{name} has {a} {things}, buys {b} more and then gives {c} to {other}. How many {things} does {name} have?",
            "There are {a} {things} on the table. {name} adds {b} {things} and {other} takes {c}. "
            "How many {things} are left?",
        ),
        _add_then_subtract,
    ),
    Kind(
        "muladd",
        "*+",
        (
            "There are {a} {holders} with {b} {things} in each and {c} more {things} on the table. "
            "How many {things} are there?",
            "{name} buys {a} {holders} of {b} {things} each and then finds {c} {things}. "
            "How many {things} does {name} have?",
        ),
        _multiply_then_add,
    ),
    Kind(
        "subsub",
        "--",
        ("{name} has {a} {things}, gives {b} to {other} and loses {c}. How many {things} does {name} have left?",),
        _subtract_twice,
    ),
)


def draw_problem(random: Random, split: Split, two_step_share: float) -> Problem:
    """Draw a problem of one side of the split; `two_step_share` of them have two steps."""
    while True:
        kind = random.choice(TWO_STEP if random.random() < two_step_share else ONE_STEP)
        problem = Problem(kind, operands := kind.draw(random), _tell(random, kind, operands))
        if problem.split() is split:
            return problem


def _tell(random: Random, kind: Kind, operands: tuple[int, ...]) -> str:
    name, other = random.sample(NAMES, 2)
    words = {"name": name, "other": other, "things": random.choice(THINGS), "holders": random.choice(HOLDERS)}
    return random.choice(kind.phrasings).format(**words, **dict(zip("abc", operands, strict=False)))


@dataclass(frozen=True, slots=True)
class Teacher:
    """How often a teacher goes wrong. A perfect one would leave nothing to learn by reinforcement."""

    wrong_operation: float = 0.0
    """Probability of another operation, for each step."""
    slip: float = 0.0
    """Probability of a wrong result, for each step."""
    stops_early: float = 0.0
    """Probability of stopping a two-step problem after its first step."""


CARELESS_TEACHER = Teacher(wrong_operation=0.25, slip=0.05, stops_early=0.6)
SLIPS = (-10, -2, -1, 1, 2, 10)
LARGEST_WRONG_PRODUCT = 150


def work(problem: Problem, random: Random, teacher: Teacher) -> str:
    """A worked answer to a training problem, as `<think> 44+50=94,94-8=86 </think> \\boxed{86}`.

    A mistake that would show a held-out sum is not made: the teacher then works the problem anew.
    """
    assert problem.split() is Split.TRAINING, "only training problems are worked"
    while True:
        steps = _steps(problem, random, teacher)
        if not any(one.held_out for one, _ in steps):
            shown = ",".join(f"{one.left}{one.operation}{one.right}={result}" for one, result in steps)
            return f"<think> {shown} </think> \\boxed{{{steps[-1][1]}}}"


def _steps(problem: Problem, random: Random, teacher: Teacher) -> list[tuple[Sum, int]]:
    """The sums that the teacher writes down, each with the result that the teacher gives it."""
    value, steps = problem.operands[0], []
    for operation, operand in zip(problem.kind.operations, problem.operands[1:], strict=True):
        if steps and random.random() < teacher.stops_early:
            break
        if random.random() < teacher.wrong_operation:
            operation = random.choice(_other_operations(value, operation, operand))
        one = Sum(value, operation, operand)
        value = one.result
        if random.random() < teacher.slip:
            value = max(0, value + random.choice(SLIPS))
        steps.append((one, value))
    return steps


def _other_operations(left: int, operation: str, right: int) -> list[str]:
    """Operations that one may confuse with the right one and whose result is a number that a child would write."""
    possible = ["+"]
    if right <= left:
        possible.append("-")
    if left * right <= LARGEST_WRONG_PRODUCT:
        possible.append("*")
    return [one for one in possible if one != operation] or [operation]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a training text."""

    text: str
    learn: bool
    """Whether the loss counts its tokens."""


DRILL_SUMS = 8
DRILL_CHAINED_SHARE = 0.5
DRILL_LARGEST_START = 100


def draw_drill(random: Random) -> list[Piece]:
    """A drill sheet: bare sums in the notation of worked answers; only their results are learned.

    About half of the sums go on from the result before them, as the second step of a problem does.
    """
    pieces, result = [Piece("<think> ", learn=False)], 0
    for index in range(DRILL_SUMS):
        one = _drill_sum(random, result)
        result = one.result
        pieces.append(Piece(f"{',' if index else ''}{one.left}{one.operation}{one.right}=", learn=False))
        pieces.append(Piece(str(result), learn=True))
    return pieces


def _drill_sum(random: Random, previous: int) -> Sum:
    while True:
        operation = random.choice("++---*")
        if 2 < previous < DRILL_LARGEST_START and random.random() < DRILL_CHAINED_SHARE:
            left = previous
        else:
            left = random.randint(2, 5 if operation == "*" else LARGEST_OPERAND)
        if (operation == "*" and left > 5) or (operation == "-" and left < 4):
            continue
        largest = {"*": 12, "+": LARGEST_OPERAND, "-": min(LARGEST_OPERAND, left - 1)}[operation]
        one = Sum(left, operation, random.randint(2, largest))
        if not one.held_out:
            return one
