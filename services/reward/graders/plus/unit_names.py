"""The names of units: which are the same, and how many of one are another."""

from __future__ import annotations

import re
from fractions import Fraction

from services.reward.graders.plus.normal import DEGREE

PERCENT = "%"
CURRENCY = "$\u20ac\u00a3\u20b9\u00a2\u00a5"
GENERIC = ""
"""What says no more than that something was counted."""

_ADJECTIVES = ("different", "distinct", "possible", "unique", "total", "more")
_SAME = f"""
cm centimeter centimetre
mm millimeter millimetre
m meter metre
km kilometer kilometre
in inch inche
ft foot feet
yd yard
mi mile
h hour hr
min minute
s second sec
mg milligram
g gram
kg kilogram
lb pound
oz ounce
l liter litre
ml milliliter millilitre
$ dollar usd
\u00a2 cent
\u20ac euro eur
\u00a3 gbp
\u20b9 rupee rs inr
{DEGREE} degree deg
{PERCENT} percent pct percentage
mi/h mph
km/h kph kmh
year yr
"""
_ALIASES = {name: unit for line in _SAME.split("\n") if line for unit, *names in [line.split()] for name in names}
_UNITS = frozenset(line.split()[0] for line in _SAME.split("\n") if line)
_ALIASES |= dict.fromkeys(("unit", "radian", "rad", *_ADJECTIVES), GENERIC)
_SIZES = {
    "length": {
        "mm": Fraction(1),
        "cm": Fraction(10),
        "m": Fraction(1000),
        "km": Fraction(1000_000),
        "in": Fraction(254, 10),
        "ft": Fraction(3048, 10),
        "yd": Fraction(9144, 10),
        "mi": Fraction(1609344),
    },
    "time": {
        "s": Fraction(1),
        "min": Fraction(60),
        "h": Fraction(3600),
        "day": Fraction(86400),
        "week": Fraction(604800),
    },
    "calendar": {"month": Fraction(1), "year": Fraction(12), "decade": Fraction(120), "century": Fraction(1200)},
    "mass": {"mg": Fraction(1), "g": Fraction(1000), "kg": Fraction(1000_000)},
    "weight": {"oz": Fraction(1), "lb": Fraction(16), "ton": Fraction(32000)},
    "volume": {"ml": Fraction(1), "l": Fraction(1000)},
    "kitchen": {"cup": Fraction(1), "pint": Fraction(2), "quart": Fraction(4), "gallon": Fraction(16)},
    "money": {"\u00a2": Fraction(1), "$": Fraction(100)},
}
_WITHOUT_MACRO = frozenset(
    (
        "sq",
        "cm",
        "mm",
        "km",
        "kg",
        "mg",
        "ml",
        "ft",
        "in",
        "yd",
        "mi",
        "hr",
        "hrs",
        "lb",
        "lbs",
        "oz",
        "tsp",
        "tbsp",
        "pts",
        "pcs",
        "rpm",
        "kWh",
    )
)
"""Short units that need no `\\text`; other words of one or two letters are products."""
_ONE_LETTER = frozenset("msghlLJNWVKCF")
_NO_UNITS = """
wrong incorrect correct false true maybe probably possibly perhaps unknown undecided
half halves third thirds fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths
hundredth hundredths thousandth thousandths millionth millionths
negative positive minus plus times inverse factorial root pi infinity infinite imaginary
and or nor not mod modulo if when where for with to from than less fewer least most below above between other
base is are be any all some no none never always left right undefined by sin cos tan log ln exp sqrt
"""
_NO_UNIT = frozenset(_NO_UNITS.split())
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
_EXPONENT = re.compile(r"\s*\^\s*\{?\s*(-?\d)\s*\}?")
_DIVISOR = re.compile(r"(\w+) \^-(\d)")
_PER = re.compile(r"/|\bper\b")
_WORD = re.compile(r"[A-Za-z]+")
_NO_WORD = re.compile(r"[^aeiouy]+|x?y?z|[a-d]+", re.IGNORECASE)
"""Three letters or more that are rather a product."""


def unit_name(text: str) -> str | None:
    """One name for the many of a unit: `cm^2` for square centimetres; None if the words are no unit."""
    text = text.replace("(", " ").replace(")", " ").replace("per cent", PERCENT)
    text = _DIVISOR.sub(r"/\1 ^\2", _EXPONENT.sub(r" ^\1 ", text.replace(".", " ")))
    names = [_simple_unit(part) for part in _PER.split(text)]
    return None if None in names else "/".join(one for one in names if one is not None)


def is_unit_without_macro(text: str, spaced: bool) -> bool:
    """Whether words behind a number are a unit though no `\\text` says so; `spaced`: a space stands before them."""
    words = _WORD.findall(text)
    return all(
        word in _WITHOUT_MACRO
        or _known(word) is not None
        or (spaced and len(word) > 2 and not _NO_WORD.fullmatch(word))
        for word in words
    )


def factor_between(one: str, other: str) -> Fraction | None:
    """How many of the other unit one of the first is; None if they do not measure the same."""
    if one == other or GENERIC in (one, other):
        return Fraction(1)
    factor = Fraction(1)
    parts = [(part.partition("^"), its.partition("^")) for part, its in _pairs(one, other)]
    for place, ((mine, _, power), (its, _, its_power)) in enumerate(parts):
        size = _size_between(mine, its)
        if power != its_power or size is None:
            return None
        factor *= size ** (int(power or 1) * (-1 if place else 1))
    return factor if parts else None


def _pairs(one: str, other: str) -> list[tuple[str, str]]:
    """What stands between the strokes of two units; nothing if that is not the same number of parts."""
    mine, others = one.split("/"), other.split("/")
    return list(zip(mine, others, strict=True)) if len(mine) == len(others) else []


def _size_between(one: str, other: str) -> Fraction | None:
    if one == other or GENERIC in (one, other):
        return Fraction(1)
    return next((sizes[one] / sizes[other] for sizes in _SIZES.values() if one in sizes and other in sizes), None)


def _simple_unit(text: str) -> str | None:
    names, power = [], ""
    for word in text.split():
        if word[0] == "^":
            power = word[1:]
        elif word.lower() in _POWERS:
            power = _POWERS[word.lower()]
        elif word != PERCENT and not _may_be_unit(word):
            return None
        else:
            names.append(_alias(word))
    if power and not names:
        return None
    name = " ".join(one for one in names if one)
    return f"{name}^{power}" if power and power != "1" else name


def _may_be_unit(word: str) -> bool:
    if word in CURRENCY or word in _ONE_LETTER:
        return True
    return word.isalpha() and len(word) > 1 and word.lower() not in _NO_UNIT


def _known(word: str) -> str | None:
    low = word.lower()
    return next(
        (_ALIASES[name] for name in (low, low.removesuffix("s"), low.removesuffix("es")) if name in _ALIASES), None
    )


def _alias(word: str) -> str:
    known = _known(word)
    if known is not None or word.lower() in _UNITS:
        return word.lower() if known is None else known
    return word.lower().removesuffix("s") if len(word) > 2 else word
