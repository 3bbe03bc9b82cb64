"""Properties of `deepscaler_plus` on generated answers of every kind, and of all built-in graders on any text.

Nothing is faked.
"""

from __future__ import annotations

import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.graders import GRADERS
from services.reward.graders.plus.compare import same
from services.reward.verdicts import Graded, Item, Question
from tests.unit.test_reward_plus import restylings

INTEGERS = st.integers(-99, 99)
POSITIVE = st.integers(2, 30)
NUMBERS = st.one_of(
    INTEGERS.map(str),
    st.builds(lambda a, b: f"{a}.{b}", INTEGERS, st.integers(1, 99)),
    st.builds(lambda a, b: f"\\frac{{{a}}}{{{b}}}", INTEGERS, POSITIVE),
    st.builds(lambda a, b: f"{a}\\sqrt{{{b}}}", POSITIVE, POSITIVE),
    st.builds(lambda a: f"{a}\\pi", POSITIVE),
)
EXPRESSIONS = st.one_of(
    NUMBERS,
    st.builds(lambda a, b: f"{a}x + {b}", POSITIVE, POSITIVE),
    st.builds(lambda a, b: f"(x - {a})^{{{b}}}", POSITIVE, POSITIVE),
    st.builds(lambda a, b: f"\\frac{{x + {a}}}{{{b}y}}", POSITIVE, POSITIVE),
)
SEVERAL = st.lists(NUMBERS, min_size=2, max_size=4, unique=True)
ANSWERS = st.one_of(
    EXPRESSIONS,
    SEVERAL.map(lambda items: f"({', '.join(items)})"),
    SEVERAL.map(", ".join),
    SEVERAL.map(lambda items: f"\\{{{', '.join(items)}\\}}"),
    st.builds(lambda a, b: f"[{a}, {a + b})", INTEGERS, POSITIVE),
    st.builds(lambda a, b: f"(-\\infty, {a}) \\cup [{a + b}, \\infty)", INTEGERS, POSITIVE),
    st.builds(lambda a, sign: f"x {sign} {a}", NUMBERS, st.sampled_from(["<", ">", "\\le", "\\ge"])),
    st.builds(lambda a, b: f"y = {a}x + {b}", POSITIVE, POSITIVE),
    st.builds(lambda a, unit: f"{a}\\text{{ {unit}}}", POSITIVE, st.sampled_from(["cm", "hours", "apples"])),
    st.builds(lambda a, sign: f"{a}{sign}", POSITIVE, st.sampled_from(["\\%", "^\\circ"])),
    st.builds(
        lambda items: f"\\begin{{pmatrix}} {items[0]} & {items[1]} \\\\ {items[-1]} & {items[0]} \\end{{pmatrix}}",
        SEVERAL,
    ),
)


@given(ANSWERS)
@settings(deadline=None, max_examples=300)
def test_an_answer_is_equal_to_itself_however_it_is_styled(answer: str) -> None:
    assert same(answer, answer)
    for styled in (*restylings(answer), f"\\boldsymbol{{{answer}}}", f"{answer}\\,"):
        assert same(styled, answer) and same(answer, styled), styled


@given(EXPRESSIONS)
@settings(deadline=None, max_examples=200)
def test_a_name_before_a_value_changes_nothing(answer: str) -> None:
    assert same(f"z = {answer}", answer) and same(answer, f"z = {answer}")


@given(ANSWERS, ANSWERS)
@settings(deadline=None, max_examples=600)
def test_two_answers_are_equal_either_way_and_in_any_style(one: str, other: str) -> None:
    verdict = same(one, other)
    assert same(other, one) == verdict
    for styled in restylings(one):
        assert same(styled, other) == verdict, styled


CHARACTERS = st.sampled_from(
    [*string.printable, "\x00", "\u202e", "\ud800", "\u00bd", "\u221e", "\\boxed{", "\\frac", "</think>"]
)
MAX_SECONDS = 1.0


@pytest.mark.parametrize("name", sorted(GRADERS))
@given(
    pieces=st.lists(CHARACTERS, min_size=1, max_size=20), times=st.sampled_from([1, 100, 50_000]), boxed=st.booleans()
)
@settings(deadline=None, max_examples=40)
def test_no_text_of_up_to_a_megabyte_raises_or_holds_up_the_service(
    name: str, pieces: list[str], times: int, boxed: bool
) -> None:
    text = ("".join(pieces) * times)[: 1 << 20]
    item = Item(f"</think>\\boxed{{{text}}}" if boxed else f"</think>{text}", "".join(pieces))
    began = time.process_time()
    draft = GRADERS[name].grade_cheaply(item)
    assert time.process_time() - began < MAX_SECONDS
    assert isinstance(draft, Graded | Question)
