"""One spelling for what LaTeX, plain text and Unicode write in many ways; the mathematics is left alone.

Relations, brackets and signs that structure an answer become single characters, so that what reads the text next can
split it at them: `\\le` is U+2264, `\\{` is U+2983, `\\cup` is U+222A, `\\pm` is U+00B1, and so on.
"""

from __future__ import annotations

import re

from services.reward.graders.plus.systems import in_a_line

SET_OPEN, SET_CLOSE = "\u2983", "\u2984"
ANGLE_OPEN, ANGLE_CLOSE = "\u27e8", "\u27e9"
LESS_EQUAL, GREATER_EQUAL, NOT_EQUAL, ABOUT = "\u2264", "\u2265", "\u2260", "\u2248"
IN, UNION, WITHOUT, EMPTY, REALS = "\u2208", "\u222a", "\u2216", "\u2205", "\u211d"
PLUS_MINUS, MINUS_PLUS, DEGREE, DOTS = "\u00b1", "\u2213", "\u00b0", "\u2026"

_TEXTS = "text textbf textit textrm textnormal textup textsf texttt mbox mathrm emph operatorname"
_STYLES = (
    "mathbf mathit mathsf bm boldsymbol displaystyle textstyle limits nolimits bf rm "
    "tiny small large Large huge Huge underline hfill therefore checkmark "
    "blacksquare square qed mathbin mathord ensuremath !"
)
_MACROS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "\\frac"),
    **dict.fromkeys(("le", "leq", "leqslant", "leqq"), LESS_EQUAL),
    **dict.fromkeys(("ge", "geq", "geqslant", "geqq"), GREATER_EQUAL),
    **dict.fromkeys(("ne", "neq"), NOT_EQUAL),
    **dict.fromkeys(("approx", "simeq"), ABOUT),
    **dict.fromkeys(("emptyset", "varnothing"), EMPTY),
    **dict.fromkeys(("setminus", "backslash", "smallsetminus"), WITHOUT),
    **dict.fromkeys(("ldots", "dots", "cdots", "dotsc"), DOTS),
    **dict.fromkeys(("degree", "deg"), DEGREE),
    **dict.fromkeys(("left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "middle"), ""),
    **dict.fromkeys(_STYLES.split(), ""),
    **dict.fromkeys((",", ";", ":", ">", " ", "quad", "qquad", "space", "thinspace", "enspace"), " "),
    "lt": "<",
    "gt": ">",
    "in": IN,
    "cup": UNION,
    "pm": PLUS_MINUS,
    "mp": MINUS_PLUS,
    "R": REALS,
    "infty": "\\infty",
    "colon": ":",
    "mid": "|",
    "overrightarrow": "\\vec",
    "vert": "|",
    "lvert": "|",
    "rvert": "|",
    "{": SET_OPEN,
    "}": SET_CLOSE,
    "lbrace": SET_OPEN,
    "rbrace": SET_CLOSE,
    "lbrack": "[",
    "rbrack": "]",
    "langle": ANGLE_OPEN,
    "rangle": ANGLE_CLOSE,
    "%": "%",
    "$": "$",
    "#": "#",
    "&": "&",
    "_": "_",
    "pounds": "\u00a3",
    "euro": "\u20ac",
    "land": " and ",
    "wedge": " and ",
    "lor": " or ",
    "vee": " or ",
    **dict.fromkeys(_TEXTS.split(), "\\text"),
}
_MACRO = re.compile(r"\\([A-Za-z]+|.)( ?\.(?!\d))?", re.DOTALL)
_SIZES = {"left", "right"}

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\x00", ""),
        **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u2005~\t\n\r", " "),
        **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\uff0d\ufe63", "-"),
        "\u2a7d": LESS_EQUAL,
        "\u2a7e": GREATER_EQUAL,
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
        "\u221e": "\\infty ",
        "\u00ba": DEGREE,
        "\u02da": DEGREE,
    }
)
_RESPELLED = (
    (re.compile(r"(?<=[\d.])\s*\\(?:mathrm|text)\s*\{\s*[eE]\s*\}\s*\{?([+-]?\d+)\}?"), r"e\1"),
    (re.compile(r"(?<=\d)\s*x\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"(?<=\d)\s*(?:\\[,; ~]\s*)?\\Omega\Z"), r"\\text{ ohms}"),
    (re.compile(r"(?<=\d)\s*\\text\s*\{\s*to\s*\}\s*(?=\d)"), ":"),
    (re.compile(r"\\mu\s*\\(?:text|mathrm)\s*\{\s*([a-zA-Z])\s*\}"), r"\\text{micro\1}"),
    (re.compile(r"\\(?:left|right)\s*\."), ""),
    (re.compile(r"(?<=\d)\s*\^\s*(?:o|\{\s*o\s*\})(?![A-Za-z])"), DEGREE),
    (re.compile(r"(?<![A-Za-z])\{([:,;.])\}(?!\d{3}(?!\d))"), r"\1"),
    (re.compile(r"\\(?:color|textcolor|tag)\*?\s*\{[^{}]*\}"), ""),
    (re.compile(r"\\(?:[hv]space|[hv]?phantom)\*?\s*\{[^{}]*\}"), " "),
    (re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})"), DEGREE),
    (re.compile(r"(?<=\d)(?:\{,\}|,\\!\s*|\{\\,\})(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\not\s*="), NOT_EQUAL),
    (re.compile(r"\\\\\s*\[[^\[\]]{0,9}\]"), r"\\\\"),
    (re.compile(r"\\math(?:bb|bf)\s*(?:R(?![A-Za-z])|\{\s*R\s*\})"), REALS),
    (re.compile(r"(\\mathbb\s*\{?\s*Z\s*\}?)\s*/\s*\(?(\w+)\s*(?:\\mathbb\s*\{?\s*Z\s*\}?)?\)?"), r"\1_\2"),
    (re.compile(r"\\(pmod|bmod)\s*\{\s*([^{}]*)\}"), r"\\\1 \2"),
)
_DOTS = re.compile(r"\.{3,}|\.(?: \.){2,}")
_AS_CHARACTERS = {"+/-": PLUS_MINUS, ">=": GREATER_EQUAL, "<=": LESS_EQUAL, "=<": LESS_EQUAL, "!=": NOT_EQUAL}
_IN_CHARACTERS = re.compile(r"\+/-|[<>]=|=<|(?<=\w) != ")
"""Signs as they are typed; `n!=6` is about a factorial."""
_UNIT_CONNECTOR = re.compile(r"(\\text\s*\{[^{}]*[a-z])[\s,;]+(and|or)[\s,;]*\}(?=\s*[-\d\\(])")
_CONNECTOR = re.compile(r"\\text\s*\{[\s,;]*(and|or)[\s,;]*\}")
_STRUCK = re.compile(r"\\text\s*\{\s*\}|\\text\s*\{\s*([-\d.,$\u20ac\u00a3]+)\s*\}")
_WHOLE_TEXT = re.compile(r"(?:\\text\s*)?\{((?:(?!\\choose|\\over\b)[^{}])*)\}")
_WRAPPED = re.compile(r"`([^`]+)`|\*\*(.+)\*\*|\$\$(.+)\$\$|\$(.+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_LEAD = re.compile(
    r"(?:(?:\\text\s*\{\s*)?(?:the\s+)?(?:final\s+)?ans(?:wer)?(?:\s+is)?\s*(?:[:=]|(?=[\s}]))\s*\}?\s*|=\s*|\\(?:implies|Rightarrow|rightarrow|to)(?![A-Za-z])\s*)(?=\S)",
    re.IGNORECASE,
)
_FRENCH = re.compile(r"([\[\]])([^\[\],]+,[^\[\],]+)([\[\]])")
MAX_GROUPS = 9
_BRACE = re.compile(r"[{}]")
_JOINING = re.compile(r"\\(?:over|choose)(?![A-Za-z])")
_ENDINGS = " .,;\\"


def clean(text: str) -> str:
    """The text in one spelling: styles, sizes and invisible things gone, structure as single characters."""
    text = _unwrapped(_without_ending(_spaced(_DOTS.sub(DOTS, text.translate(_CHARACTERS)))))
    if "\\begin" in text:
        text = in_a_line(text)
    text = _IN_CHARACTERS.sub(lambda sign: _AS_CHARACTERS[sign.group().strip()], text)
    if "\\" in text or "{" in text or "^" in text:
        for pattern, spelling in _RESPELLED:
            text = pattern.sub(spelling, text)
        text = _MACRO.sub(_macro, text)
        if "\\text" in text:
            text = _UNIT_CONNECTOR.sub(r"\1} \2 ", text)
            text = _STRUCK.sub(r"\1", _CONNECTOR.sub(r" , \1 ", text))
    text = _unwrapped(_spaced(text))
    if whole := _WHOLE_TEXT.fullmatch(text):
        text = whole[1].strip()
    text = _out_of_group(text)
    text = _without_ending(_turned_outwards(text))
    lead = _LEAD.match(text)
    return text[lead.end() :] if lead else text


def _turned_outwards(text: str) -> str:
    """Open ends in the French way, `]0,1[`, as round brackets."""
    if text[:1] != "]" and text[-1:] != "[":
        return text
    return _FRENCH.sub(lambda ends: f"{'[('[ends[1] == ']']}{ends[2]}{'])'[ends[3] == '[']}", text)


def _out_of_group(text: str) -> str:
    """Out of the braces around all of it, which styles leave behind."""
    for _ in range(MAX_GROUPS):
        if text[:1] != "{" or text[-1:] != "}" or _JOINING.search(text):
            break
        depth, end = 0, 0
        for brace in _BRACE.finditer(text):
            depth += 1 if brace.group() == "{" else -1
            end = brace.end()
            if depth <= 0:
                break
        if end < len(text) or depth:
            break
        text = text[1:-1].strip()
    return text


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _without_ending(text: str) -> str:
    """Without the punctuation of the sentence around it, or spaces and line breaks of LaTeX."""
    return text.rstrip(_ENDINGS)


def _unwrapped(text: str) -> str:
    """Out of the dollars or brackets that enclose a formula."""
    while wrapped := _WRAPPED.fullmatch(text):
        inside = next(one for one in wrapped.groups() if one)
        if "$" in inside.replace("\\$", "") or len(inside) > len(text) - 2:
            break
        text = inside.strip()
    return text


def _macro(match: re.Match[str]) -> str:
    name, dot = match.groups()
    if name in _SIZES:
        return ""  # with the dot of an invisible bracket
    return _MACROS.get(name, f"\\{name}") + (dot or "")


_TEXT_MACRO = re.compile(r"\\text\s*\{([^{}]*)\}")
_SINGLE = re.compile(r"(?<=[\^_])\s*\{\s*(\w)\s*\}")
_LOOSE = re.compile(r"(?<!\w) | (?!\w)")


def key(cleaned: str) -> str:
    """The same string for texts that differ only in what nobody sees. Spaces between words and digits count."""
    if "\\text" in cleaned:
        cleaned = _spaced(_TEXT_MACRO.sub(r"\1", cleaned))
    if SET_OPEN in cleaned:
        cleaned = cleaned.replace(":", "|")
    if "{" in cleaned:
        cleaned = _SINGLE.sub(r"\1", cleaned)
    return _LOOSE.sub("", cleaned)
