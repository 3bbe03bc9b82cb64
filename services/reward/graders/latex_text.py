"""LaTeX to plain text, as far as the answers of mathematical problems need it.

Fractions become a/b, roots √(x), symbols their Unicode character, fonts and spacing go; an unknown macro leaves nothing
but its arguments. It follows the conventions of pylatexenc's `latex_to_text`, which the DeepScaleR rule uses.
Time is linear in the length of the text, and nesting is bounded.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import ClassVar

from services.reward.graders.latex_symbols import (
    ACCENTS,
    FONTS,
    FUNCTIONS,
    LIGATURES,
    MATRICES,
    SPACES,
    SWALLOWED,
    SYMBOLS,
)

MAX_DEPTH = 200
"""Groups inside groups; deeper text is not an answer, and Python's stack has an end."""

_TOKEN = re.compile(
    r"\\(?P<macro>[a-zA-Z]+)\s*|\\(?P<escape>[\s\S])|(?P<ligature>---|--|``|''|~)|(?P<sign>[{}&\\])|(?P<text>[^\\{}&~`'-]+|[\s\S])"
)
_OPTION = re.compile(r"\s*\[([^\]\[]*)\]")
_ENVIRONMENT = re.compile(r"\s*\{([a-zA-Z]*\*?)\}")
_BLANK = re.compile(r"\s*")


class LatexError(ValueError):
    """The text is no LaTeX that can be converted."""


def latex_to_text(source: str) -> str:
    """Plain text of a piece of LaTeX. Raises LatexError where a root has no argument or groups nest too deeply."""
    return _Converter(source).sequence(0, until=())


class _Converter:
    """A recursive descent; the position moves to the right with every token."""

    def __init__(self, source: str) -> None:
        self._source, self._at = source, 0

    def sequence(self, depth: int, until: tuple[str, ...]) -> str:
        """Convert up to one of the tokens in `until` or the end."""
        if depth > MAX_DEPTH:
            raise LatexError("groups nest too deeply")
        parts: list[str] = []
        while token := _TOKEN.match(self._source, self._at):
            self._at = token.end()
            if token.group().rstrip() in until:
                break
            parts.append(self._convert(token, depth))
        return "".join(parts)

    def _convert(self, token: re.Match[str], depth: int) -> str:
        kind, text = token.lastgroup, token.group(token.lastgroup or 0)
        match kind:
            case "macro" | "escape":
                return self._macro(text, depth)
            case "ligature":
                return LIGATURES[text]
            case "sign":
                return self.sequence(depth + 1, until=("}",)) if text == "{" else "   " if text == "&" else ""
            case _:
                return text

    def _macro(self, name: str, depth: int) -> str:
        if name in SYMBOLS:
            return SYMBOLS[name]
        if name in FUNCTIONS:
            return name
        if name in SPACES:
            return SPACES[name]
        if name in SWALLOWED:
            for _ in range(SWALLOWED[name]):
                self._argument(depth)
            return ""
        special = self._SPECIAL.get(name)
        return special(self, name, depth) if special else ""

    def _argument(self, depth: int) -> str | None:
        """The next group, macro or character, or None at the end of a group."""
        if depth > MAX_DEPTH:
            raise LatexError("macros nest too deeply")
        self._at = _end(_BLANK.match(self._source, self._at), self._at)
        head = self._source[self._at : self._at + 1]
        if head in ("", "}"):
            return None
        if head not in "\\{":
            self._at += 1
            return head
        token = _TOKEN.match(self._source, self._at)
        assert token, "every character starts a token"
        self._at = token.end()
        return self._convert(token, depth + 1)

    def _fraction(self, name: str, depth: int) -> str:
        numerator = self._argument(depth)
        denominator = self._argument(depth)
        return f"{numerator or ''}/{denominator or ''}"

    def _root(self, name: str, depth: int) -> str:
        option = _OPTION.match(self._source, self._at)
        self._at = _end(option, self._at)
        argument = self._argument(depth)
        if argument is None:
            raise LatexError("a root without argument")
        return f"√({argument})"  # the degree is lost, as in the rule

    def _font(self, name: str, depth: int) -> str:
        return "".join(_styled(letter, FONTS[name]) for letter in self._argument(depth) or "")

    def _accent(self, name: str, depth: int) -> str:
        return unicodedata.normalize("NFC", (self._argument(depth) or "") + ACCENTS[name])

    def _colored(self, name: str, depth: int) -> str:
        self._argument(depth)
        return self._argument(depth) or ""

    def _begin(self, name: str, depth: int) -> str:
        opening = _ENVIRONMENT.match(self._source, self._at)
        self._at = _end(opening, self._at)
        environment = opening.group(1) if opening else ""
        if environment == "array":
            self._argument(depth)
        body = self.sequence(depth + 1, until=("\\end",))
        self._end_of_environment(name, depth)
        if environment not in MATRICES:
            return body
        rows = [" ".join(row.split("   ")) for row in body.split("\n")]
        return f"[ {'; '.join(row.strip() for row in rows)} ]"

    def _end_of_environment(self, name: str, depth: int) -> str:
        self._at = _end(_ENVIRONMENT.match(self._source, self._at), self._at)
        return ""

    _SPECIAL: ClassVar[dict[str, Callable[[_Converter, str, int], str]]] = {
        **dict.fromkeys(("frac", "nicefrac"), _fraction),
        **dict.fromkeys(FONTS, _font),
        **dict.fromkeys(ACCENTS, _accent),
        "sqrt": _root,
        "textcolor": _colored,
        "begin": _begin,
        "end": _end_of_environment,
    }


def _end(match: re.Match[str] | None, otherwise: int) -> int:
    return match.end() if match else otherwise


def _styled(letter: str, style: str) -> str:
    """The letter in a mathematical alphabet; a few stand elsewhere in Unicode. Digits stay as they are."""
    plain = unicodedata.name(letter, "").removeprefix("LATIN ").replace(" LETTER", "")
    if not letter.isalpha():
        return letter
    elsewhere = style.removeprefix("MATHEMATICAL ").replace("FRAKTUR", "BLACK-LETTER")
    for name in (f"{style} {plain}", f"{elsewhere} {plain}"):
        try:
            return unicodedata.lookup(name)
        except KeyError:
            continue
    return letter
