"""Numbers with units: centimetres, dollars, percent, degrees, or whatever things were counted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.reward.graders.plus.normal import DEGREE
from services.reward.graders.plus.unit_names import CURRENCY, GENERIC, PERCENT, is_unit_without_macro, unit_name

MAX_LETTERS = 12
"""What is longer than this and holds no digit is no number that a unit could follow."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, as the text of an expression, and the name of its unit; without a unit that is empty."""

    number: str
    unit: str = GENERIC


_MAGNITUDES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MONEY = re.compile(f"(-?)(?:US)?([{re.escape(CURRENCY)}])\\s*(.+)", re.DOTALL)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*(\\text\s*\{[^{}]*\})\s*\}\s*\{\s*(\\text\s*\{[^{}]*\})\s*\}")
_UPRIGHT = re.compile(
    r"(?P<number>.*?[^\s\\])\s*(?P<unit>(?:\s*(?:\\text\s*\{[^{}]*\}|/)(?:\s*\^\s*\{?\s*-?\d\s*\}?)?)+)", re.DOTALL
)
_PLAIN = re.compile(
    r"(?P<number>.*[\d)}\]])(?P<space>\s*)(?P<unit>[A-Za-z][A-Za-z/. ]*(?:\s*\^\s*\{?\s*\d\s*\}?)?)", re.DOTALL
)
_ENDS_IN_UNIT = re.compile(r"[A-Za-z](?:\s*\^\s*\{?\s*[23]\s*\}?)?\Z")
_TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)")
_ANGLE = re.compile(rf"([\d.]+)\s*{DEGREE}")


def read_quantity(text: str) -> Quantity:
    """Split a unit off an expression; a text without one is all number."""
    if money := _MONEY.fullmatch(text):
        return Quantity(_with_unit_behind(money[1] + money[3]).number, money[2])
    return _with_unit_behind(text)


def _with_unit_behind(text: str) -> Quantity:
    if text[-1:] in {PERCENT, *CURRENCY}:
        return Quantity(text[:-1].strip(), text[-1])
    if DEGREE in text:
        return _degrees(text)
    if "\\text" in text:
        text = _UNIT_FRACTION.sub(r"\1/\2", text)
        if upright := _UPRIGHT.fullmatch(text):
            return _quantity(text, upright["number"], _TEXT.sub(r" \1 ", upright["unit"]))
    plain = _PLAIN.fullmatch(text) if _ENDS_IN_UNIT.search(text) else None
    if plain and is_unit_without_macro(plain["unit"], spaced=bool(plain["space"])):
        return _quantity(text, plain["number"], plain["unit"])
    return Quantity(text)


def _degrees(text: str) -> Quantity:
    """An angle or a temperature; in the argument of a function a degree is a number."""
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
