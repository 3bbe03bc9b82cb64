"""The expression engine of `deepscaler_plus`: nothing is faked; Python's fractions and sympy are the oracles."""

from __future__ import annotations

import time
from dataclasses import dataclass
from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.graders.expressions.equality import equal
from services.reward.graders.expressions.evaluate import rational

MAX_SECONDS = 0.1

# --------------------------------------------------------------------------------------------------------- readings


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", "7"),
        ("- 7", "-7"),
        ("007", "7"),
        (".5", "1/2"),
        ("5.", "5"),
        ("1,234", "1234"),
        ("1{,}234{,}567", "1234567"),
        (r"1\,234", "1234"),
        (r"12,\!345", "12345"),
        ("1 000 000", "1000000"),
        (r"0.\overline{3}", "1/3"),
        (r"0.1\dot{6}", "1/6"),
        ("1.2e5", "120000"),
        (r"3\times 10^{-4}", "3/10000"),
        (r"\frac12", "1/2"),
        (r"\dfrac{1}2", "1/2"),
        (r"\tfrac 34", "3/4"),
        (r"-\frac{3}{-4}", "3/4"),
        (r"7\frac{3}{4}", "31/4"),
        ("7 3/4", "31/4"),
        (r"-2\frac14", "-9/4"),
        ("7½", "15/2"),
        ("2³", "8"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("2^{-3}", "1/8"),
        ("-2^2", "-4"),
        (r"6 \div 4", "3/2"),
        ("1/2/3", "1/6"),
        ("2(3+4)", "14"),
        ("5!", "120"),
        ("8!!", "384"),
        ("2^3!", "64"),
        (r"\binom{10}{3}", "120"),
        (r"{5 \choose 2}", "10"),
        ("10C3", "120"),
        (r"|\frac{-3}{4}|", "3/4"),
        (r"\left\lfloor \frac72 \right\rfloor", "3"),
        (r"\lceil 7/2 \rceil", "4"),
        (r"\sqrt{16}", "4"),
        (r"\sqrt[3]{-27}", "-3"),
        ("8^{2/3}", "4"),
        (r"\sqrt{\frac{9}{4}}", "3/2"),
        (r"\mathbf{\frac{1}{2}}", "1/2"),
        (r"\text{5}", "5"),
    ],
)
def test_rational_numbers(text: str, value: str) -> None:
    assert rational(text) == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        r"\pi",
        r"\sqrt2",
        "1/0",
        "0^{-1}",
        r"\frac",
        "1 2",
        "1.2.3",
        "(1",
        "1)",
        "(1]",
        "1,2",
        "1=1",
        "0.3...",
        "2^{9^9}",
    ],
)
def test_what_is_no_rational_number(text: str) -> None:
    assert rational(text) is None


EQUAL = [
    (r"\sqrt{12}", r"2\sqrt3"),
    (r"\frac{\sqrt2}2", r"\frac{1}{\sqrt{2}}"),
    (r"\sqrt[3]{2}", "2^{1/3}"),
    (r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"),
    (r"\sqrt{-4}", "2i"),
    ("3+4i", "4i+3"),
    (r"e^{i\pi}", "-1"),
    (r"\ln 4", r"2\ln 2"),
    (r"\log_2 8", "3"),
    (r"\log_{10} 2", r"\log 2"),
    (r"\ln 2", r"\log 2"),
    (r"\sin^2 x", r"1-\cos^2(x)"),
    (r"\sin 2x", r"2\sin x\cos x"),
    (r"\sin^{-1} x", r"\arcsin x"),
    (r"\arctan\frac12+\arctan\frac13", r"\frac\pi4"),
    (r"\cosh^{-1} 2", r"\ln(2+\sqrt3)"),
    (r"\cos\frac\pi2", "0"),
    (r"(-1)^n", r"\cos(n\pi)"),
    ("(n+1)!", "n!(n+1)"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    ("2^{n+1}", r"2\cdot 2^n"),
    ("x(x+1)^2", "x^3+2x^2+x"),
    ("(x+1)^{1000}", "(1+x)^{1000}"),
    ("x-x", "0"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\left|x-1\right|", r"\lvert 1-x\rvert"),
    ("x_1+x_{12}", "x_{12} + x_{1}"),
    ("f'(x)+f(1+x)", "f(x+1)+f'(x)"),
    ("\u03b1+\u03c0", r"\pi+\alpha"),
    (r"\mathrm{e}^{2}", "e^2"),
    (r"2\operatorname{sin}x", "2sinx"),
    ("9^{9^9}", r"3^{2\cdot 9^9}"),
    ("9999999!/9999998!", "9999999"),
    ("2^{100000}", "4^{50000}"),
    (r"\sqrt{a}\sqrt{b}", r"\sqrt{ab}"),
    (r"|x|\cdot|y|", "|xy|"),
    (r"\lfloor\sqrt n\rfloor", r"\lfloor n^{1/2}\rfloor"),
    (r"\frac{1+(-1)^{n+1}}{2}", r"\frac{1-(-1)^n}{2}"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_expressions(one: str, other: str) -> None:
    assert equal(one, other) is True
    assert equal(other, one) is True
    assert equal(f"{one}+1", other) is not True


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3.14", r"\pi"),
        ("1.414", r"\sqrt2"),
        ("0.333", "1/3"),
        ("36028797018963969", "36028797018963968"),
        ("0.00000001", "0"),
        (r"\sqrt2+10^{-30}", r"\sqrt2"),
        ("x+10^{-30}", "x"),
        ("1/2004!", "1/2006!"),
        ("2^{-99}", "2^{-98}"),
        ("2^{1000000}-1", "2^{1000000}"),
        ("10^{10^{11}}", "10^{10^{10}}"),
        ("1.0000001^{10^{12}}", "1"),
        (r"\sqrt[3]{5}", r"\sqrt5"),
        ("x", "X"),
        ("x_1", "x_2"),
        ("x'", "x"),
        (r"\sqrt{x^2}", "x"),
        ("|x|", "x"),
        (r"\sqrt x", r"\sqrt{-x}"),
        ("3+4i", "3-4i"),
        ("x^{12}+1", "x^{12}+x"),
        ("2^n-2", "2(2^n-1)"),
        ("f(0)", "g(0)"),
        ("-2f'(0)", "0"),
        ("|x|+|y|", "|x+y|"),
        (r"|x|y", r"x|y|"),
        ("|x+30|", "x+30"),
        (r"(-1)^{\lfloor n/2\rfloor}", "(-1)^n"),
        ("(-1)^k", "(-1)^m"),
        ("(-1)^{n(n-1)/2}", "-1"),
        (r"\lceil n/10\rceil", r"\lfloor n/10\rfloor+1"),
        (r"\lfloor m/2\rfloor", r"\lfloor n/2\rfloor"),
        (r"\frac{2}{1-(-1)^n}", r"\frac{1-(-1)^n}{2}"),
        (r"\sin^{40}x\cos^{40}x", r"\cos^{40}x\sin^{39}x"),
    ],
)
def test_unequal_expressions(one: str, other: str) -> None:
    assert equal(one, other) is False
    assert equal(other, one) is False


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("hello", "hello"),
        ("", "1"),
        ("1,2", "1,2"),
        (r"\sum_{k=1}^n k", "n"),
        (r"\text{if }x", "x"),
        (r"\frac{1}{0}", "1"),
        (r"\sqrt2+10^{-200}", r"\sqrt2"),
        ("99999999!", "99999999!+1"),
        ("9^{9^{9^9}}", "1"),
        (r"\sqrt{10^{100}+1}", "10^{50}"),
        (r"\zeta(1000)", "1"),
        (r"\infty-\infty", "0"),
        (r"\frac{dy}{dx}", r"\frac{y}{x}"),
        ("0x10", "0"),
    ],
)
def test_undecided_is_neither(one: str, other: str) -> None:
    assert equal(one, other) is None


# ------------------------------------------------------------------------------------------------------- generated


@dataclass(frozen=True, slots=True)
class Sample:
    """One expression in two spellings, and as sympy has it."""

    latex: str
    plain: str
    value: sympy.Expr


def _leaf(number: int) -> Sample:
    return Sample(str(number), f"{{{number}}}", sympy.Integer(number))


def _joined(pair: tuple[Sample, Sample], sign: str) -> Sample:
    one, other = pair
    match sign:
        case "+":
            return Sample(f"{one.latex}+{other.latex}", f"({other.plain}) + ({one.plain})", one.value + other.value)
        case "-":
            return Sample(f"{one.latex}-({other.latex})", f"-({other.plain})+({one.plain})", one.value - other.value)
        case "*":
            latex = rf"\left({one.latex}\right)\left({other.latex}\right)"
            return Sample(latex, f"({other.plain})*({one.plain})", one.value * other.value)
        case _:
            latex = rf"\dfrac{{{one.latex}}}{{{other.latex}}}"
            return Sample(latex, f"({one.plain})/({other.plain})", one.value / other.value)


def _squared(sample: Sample) -> Sample:
    return Sample(f"({sample.latex})^{{2}}", f"({sample.plain})*({sample.plain})", sample.value**2)


def _rooted(sample: Sample) -> Sample:
    """The root of a square plus one, which is real everywhere."""
    return Sample(rf"\sqrt{{({sample.latex})^2+1}}", f"(1+({sample.plain})**2)**(1/2)", sympy.sqrt(sample.value**2 + 1))


def _trees(leaves: st.SearchStrategy[Sample], roots: bool) -> st.SearchStrategy[Sample]:
    def extended(inner: st.SearchStrategy[Sample]) -> st.SearchStrategy[Sample]:
        pairs = st.builds(_joined, st.tuples(inner, inner), st.sampled_from("+-*/"))
        return st.one_of(pairs, inner.map(_squared), *([inner.map(_rooted)] if roots else []))

    finite = st.recursive(leaves, extended, max_leaves=8)
    return finite.filter(lambda sample: not sample.value.has(sympy.zoo, sympy.nan))


NUMBERS = st.integers(0, 40).map(_leaf)
SYMBOLS = st.sampled_from([Sample(name, f"({name})", sympy.Symbol(name)) for name in ("x", "y")])
RATIONALS = _trees(NUMBERS, roots=False)
FUNCTIONS = _trees(st.one_of(NUMBERS, SYMBOLS), roots=True)


@given(RATIONALS)
@settings(deadline=None, max_examples=300)
def test_generated_numbers_have_the_value_that_fractions_give(sample: Sample) -> None:
    value = Fraction(int(sample.value.p), int(sample.value.q))  # pyright: ignore[reportAttributeAccessIssue]
    assert rational(sample.latex) == value
    assert rational(sample.plain) == value


@given(FUNCTIONS, st.integers(1, 9))
@settings(deadline=None, max_examples=300)
def test_generated_functions_are_equal_in_two_spellings_and_unequal_to_others(sample: Sample, step: int) -> None:
    assert equal(sample.latex, sample.plain) is True
    assert equal(f"{sample.latex}+{step}", sample.plain) is not True
    assert equal(sample.plain, rf"{sample.latex}+\frac{{{step}}}{{10^{{20}}}}") is not True


@given(FUNCTIONS, FUNCTIONS)
@settings(deadline=None, max_examples=150)
def test_two_generated_functions_are_equal_only_if_sympy_says_so(one: Sample, other: Sample) -> None:
    verdict = equal(one.latex, other.plain)
    assert verdict == equal(other.plain, one.latex)
    if verdict:
        point = {sympy.Symbol("x"): sympy.Rational(7, 3), sympy.Symbol("y"): sympy.Rational(-5, 7)}
        difference = (one.value - other.value).xreplace(point)
        assert difference.has(sympy.zoo, sympy.nan) or abs(sympy.N(difference, 30, maxn=200)) < 1e-20


FRAGMENTS = (
    r"\frac \sqrt \sqrt[3] \binom \sin \ln \log_ \log_2 \left( \right) \pi \infty \cdot \text{cm} \text{x} "
    r"^ ^2 ^{ _ _1 { } ( ) [ ] | + - * / ! . , ' x y n i e 0 1 2 7 12 0.5 1,000 10^ 9^{9^9} "
    r"99! \lfloor \rfloor √ ² ½ \u2212 sqrt sin"
)
PIECES = st.sampled_from(FRAGMENTS.replace("\\u2212", "\u2212").split())
SOUP = st.lists(PIECES, max_size=25).flatmap(lambda pieces: st.sampled_from(["".join(pieces), " ".join(pieces)]))


@given(st.one_of(SOUP, st.text(max_size=60)), st.one_of(SOUP, FUNCTIONS.map(lambda sample: sample.plain)))
@settings(deadline=None, max_examples=400)
def test_whatever_is_written_equality_is_reflexive_and_symmetric(one: str, other: str) -> None:
    assert equal(one, one) is not False
    assert equal(one, other) == equal(other, one)
    assert rational(one) is None or equal(one, one) is True


# --------------------------------------------------------------------------------------------------------- hostile

HOSTILE = {
    "tower": "9^{9^{9^{9^{9}}}}",
    "brackets": "(" * 20_000 + "1" + ")" * 20_000,
    "fractions": r"\frac" * 790,
    "roots": r"\sqrt" * 790 + "2",
    "nested roots": r"\sqrt{" * 59 + "x" + "}" * 59,
    "powers": "x^" * 1990 + "x",
    "nested powers": "(((x+y+1)^9)^9)^9",
    "factorial": "99999999!",
    "factorials": "+".join(f"{number}!" for number in range(1990, 2300)),
    "binomials": "+".join(rf"\binom{{{2000 + number}}}{{900}}" for number in range(60)),
    "exponent": "1e999999999",
    "exponent digits": "2^{" + "9" * 3900 + "}",
    "partial fractions": "+".join(f"1/(x+{number})" for number in range(60)),
    "numeric fractions": "+".join(f"1/{number}" for number in range(101, 300)),
    "sines": r"+".join(rf"\sin {number}x" for number in range(240)),
    "hyperbolic": "".join(rf"\cosh {number}" for number in range(300)),
    "zeta": "+".join(rf"\zeta({number}.5)" for number in range(1, 160)),
    "digits": "7" * 4000,
    "signs": "-" * 3999 + "x",
    "bars": "|" * 1999 + "x" + "|" * 1999,
    "bangs": "x" + "!" * 3000,
    "spaces": " " * 3999 + "5",
    "letters": "ab" * 1990,
    "exponentials": "e^{e^{e^{e^{79}}}}",
    "subscripts": "_{" * 1990,
    "commas": "1" + ",111" * 990,
}


def _seconds(one: str, other: str) -> float:
    """Processor time of the fastest of three calls, since the machine may be busy."""
    times = []
    for _ in range(3):
        start = time.process_time()
        equal(one, other)
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_is_bounded_in_time(text: str) -> None:
    for other in ("1", "x", r"\pi/7", text + "+1", text + "+0"):
        assert max(_seconds(text, other), _seconds(other, text)) < MAX_SECONDS
    rational(text)
