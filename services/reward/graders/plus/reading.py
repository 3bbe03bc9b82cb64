"""What kind of answer a text is: a quantity, a list, a tuple, a set of numbers, a matrix, an equation, and so on.

Parts stay text; whoever compares two answers of a kind reads their parts in turn, and only as far as needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from services.reward.graders.plus.equations import is_name
from services.reward.graders.plus.inequalities import COMPARISON
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
from services.reward.graders.plus.numerals import Based, Time, read_based, read_time
from services.reward.graders.plus.pieces import in_brackets, split
from services.reward.graders.plus.regions import Region
from services.reward.graders.plus.systems import Congruence, read_congruence
from services.reward.graders.plus.units import Quantity, read_compound, read_quantity


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
class Ratio:
    terms: tuple[str, ...]


Value = Listing | Ordered | Matrix | Equation | Region | Congruence | Based | Time | Ratio | Quantity

MAX_SIGNS = 3
MAX_ITEMS = 2000
MAX_BRACKETS = 9

_MATRIX = re.compile(
    r"(?P<factor>(?:[^=,;&<>]*[\w})*+-])?)\s*"
    r"\\begin\s*\{\s*(?P<name>[pbBv]?(?:small)?matrix|array)\*?\s*\}(?:\s*\{[lcr| ]*\})?(?P<cells>.*)"
    r"\\end\s*\{\s*(?P=name)\*?\s*\}",
    re.DOTALL,
)
_TRANSPOSED = re.compile(r"(?<=[)\]}])\s*\^\s*(?:T|\\top|\\intercal|\{\s*(?:T|\\top|\\intercal)\s*\})\Z")
_SEPARATOR = re.compile(r"\s*(?:[,;]\s*(?:and|or)\b|[,;]|\b(?:and|or)\b)\s*")
_ADJACENT = re.compile(r"(,[^(),]*\))\s+(\([^(),]*,)")
"""Points with nothing but a space between them."""
_GROUPED = re.compile(r"-?\$?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?(?!\d)(?P<unit>\s*[^,;]*)")
_EQUAL = re.compile("=")
_SEMICOLON = re.compile(";")
_COLON = re.compile(":")
_ORDINAL = re.compile(r"(?P<number>\d+)\s*\^?\s*\{?\s*(?:\\text\s*\{)?\s*(?:st|nd|rd|th)\s*\}?\s*\}?")
_QUALIFIER = re.compile(rf"\s*[a-z]\s*{IN}\s*\\mathbb\s*\{{?[ZNQ]\}}?.*")


def is_grouped(text: str) -> bool:
    """Whether a text is one number whose digits stand in groups of three."""
    return _GROUPED.fullmatch(text) is not None


def read(text: str, grouped: bool = True) -> Value:
    """The answer that a clean text is. `grouped`: digits in groups of three are one number, not a list."""
    if ("matrix" in text or "array" in text or text[-2:] in ("^T", "T}", "op")) and (matrix := _read_matrix(text)):
        return matrix
    region = read_region(text)
    if region:
        return region
    if congruence := read_congruence(text):
        return congruence
    if compound := read_compound(text):
        return compound
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
    rows = split(inside, _SEMICOLON)[0]
    if brackets == "[]" and len(rows) > 1 and "," in inside:
        return Matrix(tuple(tuple(split(row, _SEPARATOR)[0]) for row in rows))
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
    if text == EMPTY or text.casefold() in ("empty set", "the empty set"):
        return Listing(())
    if "," in text:
        text = _ADJACENT.sub(r"\1, \2", text)
    if not ("," in text or ";" in text or " or " in text or " and " in text) or (grouped and is_grouped(text)):
        return None
    parts, separators = split(text, _SEPARATOR)
    items = [part for part in parts if part]
    if not COMPARISON.search(text):
        items = [item for item in items if not _QUALIFIER.fullmatch(item)]
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
    text, transposed = _transposed(_without_brackets(text))
    inside = in_brackets(text)
    if transposed and inside and "\\begin" not in inside and text[0] in "([":
        return Matrix(tuple((item,) for item in split(inside, _SEPARATOR)[0]))
    if inside and inside.startswith("\\begin") and text[0] in "([":
        text = inside
    found = _MATRIX.fullmatch(text)
    if not found or found["name"].startswith("v") or "\\begin" in found["cells"]:
        return None
    factor = found["factor"].strip(" *")
    rows = [row for row in found["cells"].split("\\\\") if row.strip()]
    if not rows:
        return None
    cells = [tuple(_scaled(cell.strip(), factor) for cell in row.split("&")) for row in rows]
    if transposed and len({len(row) for row in cells}) == 1:
        cells = zip(*cells, strict=True)
    return Matrix(tuple(cells))


def _transposed(text: str) -> tuple[str, bool]:
    """What a sign of transposition stands behind, and whether it does."""
    found = _TRANSPOSED.search(text)
    return (text[: found.start()], True) if found else (text, False)


def _scaled(cell: str, factor: str) -> str:
    if factor in ("", "+"):
        return cell
    return f"-({cell})" if factor == "-" else f"({factor})*({cell})"


def _read_single(text: str) -> Value:
    if time := read_time(text):
        return time
    if ":" in text:
        terms, _ = split(text, _COLON)
        if len(terms) > 1 and all(terms):
            return Ratio(tuple(terms))
    if based := read_based(text):
        return based
    if text[-1:] in "thnds}" and (ordinal := _ORDINAL.fullmatch(text)):
        return Quantity(ordinal["number"])
    return read_quantity(text)
