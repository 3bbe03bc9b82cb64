"""The names that occur in mathematical text, and what each stands for."""

from __future__ import annotations

import unicodedata


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TRIGONOMETRIC = _words("sin cos tan cot sec csc sinh cosh tanh coth sech csch")
FUNCTIONS = {
    **{name: name for name in TRIGONOMETRIC},
    **{f"{prefix}{name}": f"a{name}" for name in TRIGONOMETRIC for prefix in ("a", "ar", "arc")},
    **{name: name for name in _words("ln log lg exp abs floor ceil zeta cbrt cis")},
    **{"cosec": "csc", "tg": "tan", "ctg": "cot", "Gamma": "gamma"},  # noqa: PIE800  stays on one line
}
"""Names of functions in text, and in trees."""
CALLED_WITH_BRACKETS = {"Gamma", "zeta"}
"""Which are letters otherwise."""

CONSTANT_WORDS = {"pi": "\\pi", **dict.fromkeys(_words("infty inf infinity oo"), "\\infty")}
GREEK = _words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu "
    "nu xi pi rho sigma tau upsilon phi chi psi omega"
)
LETTERS = {*GREEK, *(name.capitalize() for name in GREEK), "ell", "hbar", "infty"}
VARIANTS = {f"var{name}": name for name in GREEK}
ACCENTS = "hat|widehat|vec|bar|tilde|overline|underline|mathbb|mathcal|mathfrak|mathscr|dot|ddot"
"""Macros that make another symbol of a letter, as a regular expression."""
UPRIGHT = r"text|textrm|textit|textbf|textnormal|mbox|mathrm|operatorname\*?"
"""Macros around words, as a regular expression."""

SIGNS = {
    **dict.fromkeys(_words("cdot times ast"), "*"),
    **dict.fromkeys(_words("vert mid"), "|"),
    **{"div": "/", "over": "\\over", "choose": "\\choose"},  # noqa: PIE800  stays on one line
}
OPENING = {"lvert": "|", "lfloor": "floor", "lceil": "ceil", "lbrack": "["}
CLOSING = {"rvert": "|", "rfloor": "floor", "rceil": "ceil", "rbrack": "["}
BRACKETS = {"(": "(", "[": "[", "{": "{", ")": "(", "]": "[", "}": "{"}
WITH_ARGUMENTS = {
    **dict.fromkeys(_words("frac dfrac tfrac cfrac nicefrac"), "frac"),
    **dict.fromkeys(_words("binom dbinom tbinom"), "binom"),
    "sqrt": "sqrt",
    "surd": "sqrt",
}
INVISIBLE = {
    *(f"{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r", "m")),
    *_words("left right middle quad qquad thinspace medspace negthinspace enspace space displaystyle textstyle"),
    *_words("limits nolimits mathstrut mathbf boldsymbol bm mathit mathsf bf it rm"),
}
"""Macros that change nothing but the looks; the group after them is read as any other."""

SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))


def _greek(case: str, name: str) -> str:
    return unicodedata.lookup(f"GREEK {case} LETTER {'LAMDA' if name == 'lambda' else name}")


UNICODE = {
    **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\uff0d\ufe63", "-"),
    **dict.fromkeys("\u00d7\u22c5\u00b7\u2217\u2219", "*"),
    **dict.fromkeys("\u00f7\u2044\u2215", "/"),
    **dict.fromkeys("\u2223\uff5c", "|"),
    **{
        sign: f"\\{name} "
        for sign, name in zip("√∛∞⌊⌋⌈⌉", _words("sqrt cbrt infty lfloor rfloor lceil rceil"), strict=True)
    },
    **{_greek("SMALL", name): f"\\{name} " for name in GREEK},
    **{_greek("CAPITAL", name): f"\\{name.capitalize()} " for name in GREEK},
    "\u2032": "'",
}
"""Characters outside of ASCII as LaTeX."""
