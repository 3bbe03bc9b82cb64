"""Whether two numbers with what belongs to them are equal: units, bases, hours and minutes."""

from __future__ import annotations

from services.reward.graders.expressions.equality import equal
from services.reward.graders.plus.numerals import Based, Time
from services.reward.graders.plus.reading import Value
from services.reward.graders.plus.unit_names import GENERIC, PERCENT, factor_between
from services.reward.graders.plus.units import Quantity

NOON = 12


def same_quantity(one: Quantity, other: Value) -> bool:
    """Equal numbers of the same unit, or of units of the same kind; where one has no unit, it is that of the other."""
    if not isinstance(other, Quantity):
        return False
    if PERCENT in (one.unit, other.unit) and one.unit != other.unit:
        percent, number = (one, other) if one.unit == PERCENT else (other, one)
        return number.unit == GENERIC and _same_percent(percent.number, number.number)
    factor = factor_between(one.unit, other.unit)
    if factor is None:
        return False
    return equal(one.number if factor == 1 else f"({one.number})*({factor})", other.number) is True


def _same_percent(percent: str, number: str) -> bool:
    """28 percent may be written as 28 or as 0.28."""
    return equal(percent, number) is True or equal(f"({percent})/100", number) is True


def same_numeral(one: Based, other: Value) -> bool:
    """Equal values; a numeral without a base may be one in ten, or the same numeral."""
    if isinstance(other, Based):
        return one == other or (_value(one) is not None and _value(one) == _value(other))
    if not isinstance(other, Quantity) or other.unit or _value(one) is None:
        return False
    return other.number in (one.digits, str(_value(one)))


def _value(numeral: Based) -> int | None:
    try:
        return int(numeral.digits, numeral.base)
    except ValueError:
        return None


def same_time(one: Time, other: Value) -> bool:
    """The same hour and minute, in the same half of the day if both say or imply which."""
    if not isinstance(other, Time) or one.minutes != other.minutes:
        return False
    if one.half != other.half and one.hours == other.hours:
        return not one.half or not other.half
    return _hour_of_day(one) == _hour_of_day(other)


def _hour_of_day(time: Time) -> int:
    return time.hours % NOON + (NOON if time.half == "pm" else 0) if time.half else time.hours
