"""What kind of answer a text is: a quantity, a list, a tuple, a set of numbers, a matrix, an equation, and so on.

Parts stay text; whoever compares two answers of a kind reads their parts in turn, and only as far as needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from services.reward.graders.plus.equations import is_name
from services.reward.graders.plus.intervals import read_region
from services.reward.graders.plus.normal import (
    ABOUT,
    ANGLE_CLOSE,
    ANGLE_OPEN,
    EMPTY,
    IN,
    MINUS_PLUS,
    PLUS_MINUS,
    SET_OPEN,
)
from services.reward.graders.plus.pieces import in_brackets, split
from services.reward.graders.plus.regions import Region
from services.reward.graders.plus.units import Quantity, read_quantity


@dataclass(frozen=True, slots=True)
class Listing:
    """Things in any order: a set, the solutions of an equation, `a or b`."""

    items: tuple[str, ...]
    joined: str = ""
    """The word between them, `and` or `or`, if there is one."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """Things whose order counts: a tuple, a point, an interval, a row of a matrix."""

    items: tuple[str, ...]
    brackets: str


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """Sides that are equal, first to last."""

    sides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Based:
    """A numeral with its base."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Time:
    hours: int
    minutes: str
    half: str
    """`am`, `pm`, or empty if it is not said."""


@dataclass(frozen=True, slots=True)
class Ratio:
    terms: tuple[str, ...]


Value = Listing | Ordered | Matrix | Equation | Region | Based | Time | Ratio | Quantity

MAX_SIGNS = 3
MAX_ITEMS = 2000
MAX_BRACKETS = 9

_MATRIX = re.compile(
    r"\\begin\s*\{\s*(?P<name>[pbBv]?matrix|smallmatrix|array)\*?\s*\}(?:\s*\{[lcr| ]*\})?(?P<cells>.*)"
    r"\\end\s*\{\s*(?P=name)\*?\s*\}",
    re.DOTALL,
)
_SEPARATOR = re.compile(r"\s*(?:[,;]\s*(?:and|or)\b|[,;]|\b(?:and|or)\b)\s*")
_GROUPED = re.compile(r"-?\$?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?!\d)(?P<unit>\s*[^,;]*)")
_EQUAL = re.compile("=")
_COLON = re.compile(":")
_TIME = re.compile(r"(?P<hours>\d{1,2})\s*:\s*(?P<minutes>\d\d)\s*(?:(?P<half>[ap])\.?\s*m\.?)?", re.IGNORECASE)
_BASED = re.compile(r"\(?(?P<digits>[0-9A-Z]+)\)?\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(?P<base>\d{1,2}|[a-z]+)\s*\}?\s*\}?")
_BASES = [
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
_ORDINAL = re.compile(r"(?P<number>\d+)\s*\^?\s*\{?\s*(?:\\text\s*\{)?\s*(?:st|nd|rd|th)\s*\}?\s*\}?")
_WORDS = re.compile(r"\\text\s*\{([^{}]*)\}")
_QUALIFIER = re.compile(rf"\s*[a-z]\s*{IN}\s*\\mathbb\s*\{{?[ZNQ]\}}?.*")


def is_grouped(text: str) -> bool:
    """Whether a text is one number whose digits stand in groups of three."""
    return _GROUPED.fullmatch(text) is not None


def read(text: str, grouped: bool = True) -> Value:
    """The answer that a clean text is. `grouped`: digits in groups of three are one number, not a list."""
    if ("matrix" in text or "array" in text) and (matrix := _read_matrix(text)):
        return matrix
    region = read_region(text)
    if region:
        return region
    if listing := _read_listing(text, grouped):
        return listing
    if PLUS_MINUS in text and text[0] != SET_OPEN and text.count(PLUS_MINUS) + text.count(MINUS_PLUS) <= MAX_SIGNS:
        return _with_both_signs(text)
    if ABOUT in text:
        parts = [part.strip() for part in text.split(ABOUT)]
        exact = next((part for part in parts if part and not is_name(part)), parts[0])
        return read(exact, grouped)
    if "=" in text:
        parts, _ = split(text, _EQUAL)
        if len(parts) > 1:
            return Equation(tuple(parts))
    text = _without_brackets(text)
    inside = in_brackets(text)
    if inside is not None and text[0] != "{":
        return _read_bracketed(text, inside, grouped)
    return _read_single(text)


def _read_bracketed(text: str, inside: str, grouped: bool) -> Value:
    items = [part for part in split(inside, _SEPARATOR)[0] if part]
    if text[0] == SET_OPEN:
        return Listing(tuple(items))
    brackets = text[0] + text[-1]
    if len(items) > 1:
        return Ordered(tuple(items), "()" if brackets == ANGLE_OPEN + ANGLE_CLOSE else brackets)
    return Ordered((inside,), brackets) if brackets != "()" else _read_single(inside)


def _without_brackets(text: str) -> str:
    """Out of round brackets within each other, if there is no comma between them."""
    for _ in range(MAX_BRACKETS):
        inside = in_brackets(text)
        if inside is None or text[0] + text[-1] != "()" or in_brackets(inside) is None:
            break
        text = inside
    return text


def _read_listing(text: str, grouped: bool) -> Listing | None:
    if text == EMPTY:
        return Listing(())
    if not ("," in text or ";" in text or " or " in text or " and " in text) or (grouped and is_grouped(text)):
        return None
    parts, separators = split(text, _SEPARATOR)
    items = [part for part in parts if part and not _QUALIFIER.fullmatch(part)]
    if len(parts) < 2 or len(items) > MAX_ITEMS:
        return None
    words = [word for word in ("and", "or") if any(word in one for one in separators)]
    return Listing(tuple(items), " ".join(words))


def _with_both_signs(text: str) -> Listing:
    """`a \\pm b` is two values; several signs are independent unless one of them is turned round."""
    if MINUS_PLUS in text:
        choices = ["+-", "-+"]
        return Listing(tuple(text.replace(PLUS_MINUS, one[0]).replace(MINUS_PLUS, one[1]) for one in choices))
    parts = text.split(PLUS_MINUS)
    values = []
    for signs in product("+-", repeat=len(parts) - 1):
        values.append(parts[0] + "".join(sign + part for sign, part in zip(signs, parts[1:], strict=True)))
    return Listing(tuple(values))


def _read_matrix(text: str) -> Matrix | None:
    text = _without_brackets(text)
    inside = in_brackets(text)
    if inside and inside.startswith("\\begin") and text[0] in "([":
        text = inside
    found = _MATRIX.fullmatch(text)
    if not found or found["name"] == "vmatrix" or "\\begin" in found["cells"]:
        return None
    rows = [row for row in found["cells"].split("\\\\") if row.strip()]
    return Matrix(tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows))


def _read_single(text: str) -> Value:
    if ":" in text:
        plain = _WORDS.sub(r"\1", text)
        if time := _TIME.fullmatch(plain.strip()):
            return Time(int(time["hours"]), time["minutes"], f"{time['half']}m".lower() if time["half"] else "")
        terms, _ = split(text, _COLON)
        if len(terms) > 1 and all(terms):
            return Ratio(tuple(terms))
    if "_" in text and (based := _BASED.fullmatch(text)):
        base = _base(based["base"])
        if base and based["digits"][0].isdigit():
            return Based(based["digits"], base)
    if text[-1:] in "thnds}" and (ordinal := _ORDINAL.fullmatch(text)):
        return Quantity(ordinal["number"])
    return read_quantity(text)


def _base(text: str) -> int | None:
    if text.isdecimal():
        return int(text) if 2 <= int(text) <= 36 else None
    return _BASES.index(text) + 2 if text in _BASES else None
