"""Splitting a text outside of its brackets."""

from __future__ import annotations

import re

from services.reward.graders.plus.normal import ANGLE_CLOSE, ANGLE_OPEN, SET_CLOSE, SET_OPEN

OPENING = f"([{{{SET_OPEN}{ANGLE_OPEN}"
CLOSING = f")]}}{SET_CLOSE}{ANGLE_CLOSE}"
_BRACKET = re.compile(f"[{re.escape(OPENING + CLOSING)}]")


def outside(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The matches of a pattern that stand in no bracket; none if the brackets do not match up."""
    found = list(pattern.finditer(text))
    if not found:
        return []
    depth, changes = 0, [(0, 0)]
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket.group() in OPENING else -1
        if depth < 0:
            return []
        changes.append((bracket.start(), depth))
    if depth:
        return []
    kept, position = [], 0
    for match in found:
        while position + 1 < len(changes) and changes[position + 1][0] < match.start():
            position += 1
        if changes[position][1] == 0:
            kept.append(match)
    return kept


def split(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between the matches that stand in no bracket, stripped, and those matches."""
    matches = outside(text, pattern)
    starts = [0, *(match.end() for match in matches)]
    ends = [*(match.start() for match in matches), len(text)]
    parts = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    return parts, [match.group().strip() for match in matches]


def in_brackets(text: str) -> str | None:
    """What stands between the first and the last character if those are brackets that belong together."""
    if len(text) < 2 or text[0] not in OPENING or text[-1] not in CLOSING:
        return None
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket.group() in OPENING else -1
        if depth <= 0 and bracket.end() != len(text):
            return None
    return text[1:-1].strip() if depth == 0 else None
