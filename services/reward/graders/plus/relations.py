"""Chains of relations that describe no set of numbers, such as `f(1) < f(2) < f(4)`."""

from __future__ import annotations

import re
from collections.abc import Callable

from services.reward.graders.plus.equations import same_side
from services.reward.graders.plus.normal import GREATER_EQUAL, LESS_EQUAL
from services.reward.graders.plus.pieces import split

_COMPARISON = re.compile("[<>=\u2264\u2265\u2260]")
_SEVERAL = re.compile(r"\b(?:and|or)\b")
_REVERSED = {"<": ">", ">": "<", LESS_EQUAL: GREATER_EQUAL, GREATER_EQUAL: LESS_EQUAL}
MAX_SIDES = 20


def same_relation(answer: str, label: str, same: Callable[[str, str], bool]) -> bool:
    """Whether two chains have the same signs between the same sides, read from the left or from the right."""
    if not any(sign in label for sign in _REVERSED) or not any(sign in answer for sign in _REVERSED):
        return False
    if _SEVERAL.search(answer) or _SEVERAL.search(label):
        return False
    sides, signs = split(answer, _COMPARISON)
    label_sides, label_signs = split(label, _COMPARISON)
    if not 1 < len(sides) == len(label_sides) <= MAX_SIDES:
        return False
    if signs != label_signs:
        sides, signs = sides[::-1], [_REVERSED.get(sign, sign) for sign in reversed(signs)]
    if signs == label_signs and all(same(*pair) for pair in zip(sides, label_sides, strict=True)):
        return True
    return (
        len(signs) == 1
        and signs[0] != "="
        and same_side(_rising(sides, signs), _rising(label_sides, label_signs))
        and _strict(signs) == _strict(label_signs)
    )


def _rising(sides: list[str], signs: list[str]) -> tuple[str, ...]:
    return tuple(sides if signs[0] in ("<", LESS_EQUAL) else reversed(sides))


def _strict(signs: list[str]) -> bool:
    return signs[0] in "<>"
