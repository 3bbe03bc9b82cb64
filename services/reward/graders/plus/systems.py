"""Equations one below the other, as models set them, and residues."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.reward.graders.expressions.equality import equal
from services.reward.graders.expressions.evaluate import rational

_BLOCK = re.compile(
    r"(?:\\(?:displaystyle|left)\s*)*(?:\\\{|\\lbrace)?\s*"
    r"\\begin\s*\{(?P<name>aligned|align|gathered|split|cases|array)\*?\}"
    r"(?:\s*\{[lcr]*\})?(?P<rows>.*)\\end\s*\{(?P=name)\*?\}(?:\s*\\right\s*\.?)?",
    re.DOTALL,
)
_BREAK = re.compile(r"\\\\(?:\s*\[[^\[\]]{0,9}\])?")
_ALIGNED = re.compile(r"\s*&\s*=\s*&?|\s*=\s*&")
_MOD = r"(?:\\text\s*\{\s*mod\s*\}|\\?\bmod(?![A-Za-z])|\\[pb]mod(?![A-Za-z]))"
_CONGRUENCE = re.compile(
    r"(?:(?P<name>[A-Za-z])\s*(?:\\equiv|\u2261)\s*)?(?P<residue>[^=\\()]+?)\s*"
    rf"(?P<brackets>\\pmod(?![A-Za-z])|\(\s*{_MOD})?(?(brackets)|(?:\\[pb])?{_MOD})\s*(?P<modulus>\w+)\s*(?(brackets)\)?)"
)


def in_a_line(text: str) -> str:
    """Equations of a system with commas between them; any other text as it is."""
    block = _BLOCK.fullmatch(text)
    if not block:
        return text
    rows = [_ALIGNED.sub("=", row).strip(" ,.;") for row in _BREAK.split(block["rows"])]
    rows = [row for row in rows if row]
    return ", ".join(rows) if rows and all("=" in row and "&" not in row for row in rows) else text


@dataclass(frozen=True, slots=True)
class Congruence:
    """A residue, as text, and its modulus; `name` is what is congruent to it."""

    residue: str
    modulus: str
    name: str = ""


def read_congruence(text: str) -> Congruence | None:
    """The residue in `x \\equiv 1 \\pmod 4` or `1 \\pmod 4`, or the remainder that `5 \\bmod 4` is."""
    found = _CONGRUENCE.fullmatch(text) if "mod" in text else None
    if not found:
        return None
    residue, modulus, name = found["residue"], found["modulus"], found["name"] or ""
    value, size = rational(residue), rational(modulus)
    if not name and (value is None or not size or size < 0):
        return None
    if not name and not found["brackets"] and value is not None and size:
        residue = str(value % size)
    return Congruence(residue, modulus, name)


def same_congruence(one: Congruence, other: Congruence) -> bool:
    """Whether two residues are the same; both names must be, if both are given."""
    if one.modulus != other.modulus or (one.name and other.name and one.name != other.name):
        return False
    modulus, difference = rational(one.modulus), rational(f"({one.residue})-({other.residue})")
    if not modulus or difference is None:
        return equal(one.residue, other.residue) is True
    return (difference / modulus).denominator == 1
