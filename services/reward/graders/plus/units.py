"""Numbers with units: centimetres, dollars, percent, degrees, or whatever things were counted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.reward.graders.plus.normal import DEGREE
from services.reward.graders.plus.unit_names import (
    CURRENCY,
    GENERIC,
    PERCENT,
    factor_between,
    is_unit_without_macro,
    unit_name,
)

MAX_LETTERS = 12
"""What is longer than this and holds no digit is no number that a unit could follow."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, as the text of an expression, and the name of its unit; without a unit that is empty."""

    number: str
    unit: str = GENERIC


_MAGNITUDES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MONEY = re.compile(f"(-?)(?:US)?([{re.escape(CURRENCY)}])\\s*(.+)", re.DOTALL)
_MONEY_IN_WORDS = re.compile(r"\\text\s*\{\s*(Rs|USD|EUR|GBP|INR)\.?\s*\}\s*([\d.,]+)", re.IGNORECASE)
_AND = r"(?:\\text\s*\{\s*and\s*\}|and\b)"
_PART = (
    r"(\d[\d./]*|\d+ \d+/\d+)\s*(?:\\text\s*\{\s*([a-z. ]+?)(?:\s+and)?\s*\}|([a-z]+)\b\.?)"
    rf"[\s,]*{_AND}?\s*"
)
_COMPOUND = re.compile(rf"(?:{_PART}){{2,4}}", re.IGNORECASE)
_ITS_PART = re.compile(_PART, re.IGNORECASE)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORD = r"\\text\s*\{[^{}]*\}(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_UNIT_FRACTION = re.compile(rf"\\frac\s*\{{\s*({_WORD})\s*\}}\s*\{{\s*({_WORD})\s*\}}")
_UPRIGHT = re.compile(
    rf"(?P<number>.*?[^\s\\])(?P<unit>(?>(?:\s*(?:(?:/|\\cdot)\s*)?{_WORD})+))",  # atomic, so that it fails at once
    re.DOTALL,
)
_PLAIN = re.compile(
    r"(?P<number>.*[\d)}\]])(?P<space>\s*)(?P<unit>[A-Za-z][A-Za-z/. ]*(?:\s*\^\s*\{?\s*\d\s*\}?)?)", re.DOTALL
)
_ENDS_IN_UNIT = re.compile(r"[A-Za-z](?:\s*\^\s*\{?\s*[23]\s*\}?)?\Z")
_TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc|cis)")
_MINUTES = re.compile(rf"(\d+)\s*{DEGREE}\s*(\d+)\s*(?:'|\^\s*\{{?\\prime\}}?)\s*(?:(\d+)\s*(?:''|\"))?")
_ANGLE = re.compile(rf"([\d.]+)\s*{DEGREE}")


def read_quantity(text: str) -> Quantity:
    """Split a unit off an expression; a text without one is all number."""
    if words := _MONEY_IN_WORDS.fullmatch(text):
        return Quantity(words[2], unit_name(words[1]) or "")
    if money := _MONEY.fullmatch(text):
        return Quantity(_with_unit_behind(money[1] + money[3]).number, money[2])
    return _with_unit_behind(text)


def read_compound(text: str) -> Quantity | None:
    """`2 hours 30 minutes` as 150 minutes: units of one kind that become smaller; None for any other text."""
    if not text[:1].isdigit() or not _COMPOUND.fullmatch(text):
        return None
    parts = [(number, unit_name(upright or plain)) for number, upright, plain in _ITS_PART.findall(text)]
    smallest, terms, last = parts[-1][1], [], None
    for number, unit in parts:
        factor = factor_between(unit, smallest) if unit and smallest else None
        if factor is None or (last is not None and factor >= last):
            return None
        terms.append(f"({number})*({factor})")
        last = factor
    return Quantity("+".join(terms), smallest or GENERIC)


def _with_unit_behind(text: str) -> Quantity:
    if text[-1:] in {PERCENT, *CURRENCY}:
        return Quantity(text[:-1].strip(), text[-1])
    if DEGREE in text:
        return _degrees(text)
    if "\\text" in text:
        text = _UNIT_FRACTION.sub(r"\1/\2", text)
        if upright := _UPRIGHT.fullmatch(text):
            return _quantity(text, upright["number"], _TEXT.sub(r" \1 ", upright["unit"]).replace("\\cdot", " "))
    plain = _PLAIN.fullmatch(text) if _ENDS_IN_UNIT.search(text) else None
    if plain and is_unit_without_macro(plain["unit"], spaced=bool(plain["space"])):
        return _quantity(text, plain["number"], plain["unit"])
    return Quantity(text)


def _degrees(text: str) -> Quantity:
    """An angle or a temperature; in the argument of a function a degree is a number."""
    if parts := _MINUTES.fullmatch(text):
        return Quantity(f"{parts[1]}+{parts[2]}/60+{parts[3] or 0}/3600", DEGREE)
    number, _, scale = text.rpartition(DEGREE)
    scale = _TEXT.sub(r"\1", scale).strip()
    if DEGREE in number or len(scale) > 1 or _TRIGONOMETRY.search(number):
        return Quantity(_ANGLE.sub(r"(\1\\pi/180)", text))
    return Quantity(number.strip(), DEGREE + scale.lower())


def _quantity(text: str, number: str, unit: str) -> Quantity:
    name = unit_name(unit)
    if name is None or (len(number) > MAX_LETTERS and not any(map(str.isdigit, number))):
        return Quantity(text)
    if number.endswith(PERCENT):
        return Quantity(number[:-1], PERCENT)
    magnitude, _, rest = name.partition(" ")
    if magnitude in _MAGNITUDES:
        return Quantity(f"({number})*10^{_MAGNITUDES[magnitude]}", rest)
    return Quantity(number.strip(), name)
