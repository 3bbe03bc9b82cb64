"""Mathematical text as a list of tokens: LaTeX, plain notation and Unicode, mixed as models write them."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from services.reward.graders.expressions.vocabulary import (
    ACCENTS,
    BRACKETS,
    CALLED_WITH_BRACKETS,
    CLOSING,
    CONSTANT_WORDS,
    FUNCTIONS,
    INVISIBLE,
    LETTERS,
    OPENING,
    SIGNS,
    SUBSCRIPTS,
    SUPERSCRIPTS,
    UNICODE,
    UPRIGHT,
    VARIANTS,
    WITH_ARGUMENTS,
)

MAX_CHARACTERS = 4000
MAX_TOKENS = 1000


class Unreadable(ValueError):
    """The text is no expression of the kind that is read here, or one beyond the bounds."""


class Token(NamedTuple):
    kind: str
    """`number`, `name` of a symbol, `function`, `open` or `close` of brackets, `macro` with arguments, or `sign`."""
    text: str
    spaced: bool = False
    """Something invisible stands before it."""


_PRODUCTS = re.compile(r"[t-z]+|[a-d]+|[p-t]+|[k-n]+")
"""Three letters or more that are read as a product; other words are words."""
_NO_PRODUCT = re.compile(r"[IVX]{2,}|no|on|or|of|if|is")

_SPACE = r"(?:\s|~|\\[,;:!> ])+|\\(?:left|right)\s*\."
_PERIOD = r"\\(?:overline|bar)\s*(?:\{\d+\}|\d)|\\dot\s*\{?\d\}?(?:\d*\\dot\s*\{?\d\}?)?"
_NUMBER = rf"(?:\d+(?:\.\d*)?|\.\d+)(?:{_PERIOD}|[eE][+-]?\d+(?![\d.]))?"
_TOKEN = re.compile(
    rf"(?P<space>{_SPACE})|(?P<number>{_NUMBER})"
    rf"|\\(?:{UPRIGHT})\s*\{{(?P<text>[^{{}}\\]*)\}}"
    rf"|\\(?P<accent>{ACCENTS})(?:\s*\{{\s*(?P<accented>\\?[A-Za-z]{{1,7}})\s*\}}|\s(?P<accented_letter>[A-Za-z]))"
    r"|(?P<bars>\\left\s*\||\\right\s*\||\\[bB]igg?[lr]\s*\|)"
    r"|\\(?P<macro>[A-Za-z]+)"
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<subscript>_\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|10(?!\d)|[0-9A-Za-z]|\\[A-Za-z]+))"
    r"|(?P<prime>'+|\^\s*(?:\{\s*(?:\\prime\s*)+\}|\\prime(?![A-Za-z])))"
    r"|(?P<sign>\*\*|[-+*/^!|()\[\]{}])"
)

_RAISED, _LOWERED = re.compile(f"[{''.join(SUPERSCRIPTS)}]+"), re.compile(f"[{''.join(SUBSCRIPTS)}]+")
_TRANSLATION = str.maketrans(UNICODE)
_SEPARATED = re.compile(
    r"(?<![\d.,])[1-9]\d{0,2}(?:(?:\{,\}|,\\!|,|\\[,;:! ]|[ ~\u00a0\u2009\u202f])\d{3})+(?![\d,]|\s*/)"
)
_HEXADECIMAL = re.compile(r"(?<![\w.])0[xXbBoO][0-9]")
_DERIVATIVE = re.compile(r"\\[dt]?frac\s*\{\s*d\s*[a-zA-Z]?\s*\}\s*\{\s*d\s*[a-z]\s*\}")
_NOT_A_DIGIT = re.compile(r"\D")
_CHOOSE = re.compile(
    r"(?:\{\}\s*)?[_^]\s*\{?(\d+)\}?\s*([CP])\s*_\s*\{?(\d+)\}?"
    r"|\b([CP])\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)|(?<![\d.])(\d+)\s*([CP])\s*(\d+)(?![\d.])"
    r"|\b([CP])_\s*\{?(\d\d|[4-9])\}?\s*\^\s*\{?(\d)\}?"
)
"""10C3 and its other spellings, and likewise 10P3 for what is chosen in order."""


def tokenize(text: str) -> list[Token]:
    """Split an expression into tokens. Raises Unreadable on anything that has no place in one."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable("too long")
    text = _plain(text)
    tokens: list[Token] = []
    at, spaced = 0, False
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise Unreadable(f"{text[at]!r} has no place in an expression")
        at = match.end()
        kind = match.lastgroup or ""
        if kind == "space":
            spaced = True
        else:
            _append(tokens, match, kind, spaced)
            spaced = False
    if len(tokens) > MAX_TOKENS:
        raise Unreadable("too many tokens")
    return tokens


def _plain(text: str) -> str:
    if not text.isascii():
        text = _RAISED.sub(lambda run: "^{" + "".join(map(SUPERSCRIPTS.__getitem__, run.group())) + "}", text)
        text = _LOWERED.sub(lambda run: "_{" + "".join(map(SUBSCRIPTS.__getitem__, run.group())) + "}", text)
        text = "".join(map(_vulgar_fraction, text))
        text = unicodedata.normalize("NFKC", text.translate(_TRANSLATION))
    if _HEXADECIMAL.search(text) or _DERIVATIVE.search(text):
        raise Unreadable("a number of a programming language, or a derivative")
    text = _SEPARATED.sub(lambda run: _NOT_A_DIGIT.sub("", run.group()), text)
    return _CHOOSE.sub(_binomial, text) if "C" in text or "P" in text else text


def _vulgar_fraction(character: str) -> str:
    above, slash, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}" if slash and above and below else character


def _binomial(match: re.Match[str]) -> str:
    letter, above, below = sorted((one for one in match.groups() if one), key=str.isdecimal)
    return f"\\binom{{{above}}}{{{below}}}" + (f"({below})!" if letter == "P" else "")


def _append(tokens: list[Token], match: re.Match[str], kind: str, spaced: bool) -> None:
    text = match.group(kind)
    match kind:
        case "number":
            tokens.append(Token("number", text, spaced))
        case "sign" | "bars":
            tokens.append(_sign(text.strip()))
        case "macro":
            tokens.extend(_macro(text, _followed_by_bracket(match)))
        case "word":
            tokens.extend(_word(text))
        case "text":
            tokens.extend(_upright(text.strip()))
        case "accented" | "accented_letter":
            tokens.append(Token("name", f"{match['accent']} {text.strip()}"))
        case _:
            _extend_name(tokens, text)


def _followed_by_bracket(match: re.Match[str]) -> bool:
    return match.string[match.end() : match.end() + 8].replace("\\left", "").lstrip().startswith("(")


def _sign(text: str) -> Token:
    if text[-1] == "|" and len(text) > 1:
        return Token("close" if text.startswith("\\right") or "r" in text[1:-1] else "open", "|")
    if text in BRACKETS:
        return Token("open" if text in "([{" else "close", BRACKETS[text])
    return Token("sign", "^" if text == "**" else text)


def _macro(name: str, called: bool) -> list[Token]:
    name = VARIANTS.get(name, name)
    if name in INVISIBLE:
        return []
    if name in WITH_ARGUMENTS:
        return [Token("macro", WITH_ARGUMENTS[name])]
    if name in FUNCTIONS and (called or name not in CALLED_WITH_BRACKETS):
        return [Token("function", FUNCTIONS[name])]
    if name in LETTERS:
        return [Token("name", f"\\{name}")]
    for kind, table in (("sign", SIGNS), ("open", OPENING), ("close", CLOSING)):
        if name in table:
            return [Token(kind, table[name])]
    raise Unreadable(f"\\{name}")


def _word(text: str) -> list[Token]:
    """A function, a constant, or a product of letters; `sinx` is a function of one letter."""
    if known := _known(text):
        return [known]
    if _NO_PRODUCT.fullmatch(text):
        raise Unreadable(f"the word or Roman numeral {text[:20]}")
    if len(text) > 2 and not _PRODUCTS.fullmatch(text):
        head = _known(text[:-1])
        if not head or head.kind == "name":
            raise Unreadable(f"the word {text[:20]}")
        return [head, Token("name", text[-1])]
    return [Token("name", letter) for letter in text]


def _known(text: str) -> Token | None:
    if text == "sqrt":
        return Token("macro", text)
    if text in FUNCTIONS and text not in CALLED_WITH_BRACKETS:
        return Token("function", FUNCTIONS[text])
    return Token("name", CONSTANT_WORDS[text]) if text in CONSTANT_WORDS else None


def _upright(text: str) -> list[Token]:
    """The content of `\\text` and the like: one letter, a number or a function; more is a word."""
    if not text:
        return []
    if known := _known(text):
        return [known]
    if len(text) == 1 and text.isascii() and text.isalpha():
        return [Token("name", text)]
    if text.replace(".", "", 1).isdecimal() and text.isascii():
        return [Token("number", text)]
    raise Unreadable(f"the word {text[:20]}")


_DECORATION = re.compile(r"[{}\s]|\\(?:text|mathrm|rm)(?![A-Za-z])")


def _extend_name(tokens: list[Token], text: str) -> None:
    """A subscript or primes belong to the name before them; that of a logarithm is its base."""
    last = tokens[-1] if tokens else None
    if last and last.kind == "name":
        primes = text.count("'") or text.count("\\prime")
        tokens[-1] = Token("name", last.text + ("'" * primes or _DECORATION.sub("", text)))
    elif last and last.text == "log" and text.startswith("_"):
        tokens.append(Token("sign", "_"))
        tokens.extend([Token("open", "{"), *tokenize(text[1:].strip()), Token("close", "{")])
    else:
        raise Unreadable("a subscript or prime of something that is no name")
