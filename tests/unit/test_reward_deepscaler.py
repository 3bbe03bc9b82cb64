"""The deepscaler rule against labelled cases, and against small expectations worked out by hand. Nothing is faked."""

from __future__ import annotations

import json

import pytest

from services.reward.graders import GRADERS
from services.reward.graders import deepscaler as rule
from services.reward.verdicts import Graded, Item, Question, Reason, Verdict
from tests.conftest import shared_file


def grade(item: Item) -> Graded:
    """The whole rule in this process."""
    draft = rule.grade_cheaply(item)
    return item.scored(rule.decide(draft).reason) if isinstance(draft, Question) else draft


def score(answer: str, label: str) -> int:
    graded = grade(Item(f"<think>x</think> \\boxed{{{answer}}}", label))
    assert graded.verdict is Verdict.SCORED
    return int(graded.reason is Reason.CORRECT)


def test_every_labelled_case_agrees_with_the_reference_rule() -> None:
    rows = map(json.loads, shared_file("cases/grader_cases.jsonl").read_text().splitlines())
    finite = [row for row in rows if not row["strict_hangs"]]
    differing = [
        row["id"]
        for row in finite
        if (grade(Item(row["response"], row["label"])).reason is Reason.CORRECT) != bool(row["strict_deepscaler"])
    ]
    assert len(finite) > 600
    assert differing == []


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("4 \\boxed{4}", Reason.NO_THINK_TAG),
        ("<think>\\boxed{4}", Reason.NO_THINK_TAG),
        ("</think> 4", Reason.NO_ANSWER),
        ("</think> \\boxed 4", Reason.NO_ANSWER),
        ("</think> \\fbox{4}", Reason.NO_ANSWER),
        ("</think> \\boxed{4", Reason.NO_ANSWER),
        ("\\boxed{4}</think> so", Reason.NO_ANSWER),
        ("</think> \\boxed{4} then \\boxed{5}", Reason.WRONG),
        ("</think> \\boxed{5} then \\boxed{4}", Reason.CORRECT),
        ("a</think> \\boxed{5} b</think> \\boxed{4}", Reason.CORRECT),
        ("###Response\\boxed{4}", Reason.CORRECT),
        ("###Response\\boxed{4}###Response\\boxed{5}", Reason.CORRECT),
        ("</think> \\boxed{\\text{4}}", Reason.CORRECT),
    ],
)
def test_where_the_answer_is(response: str, reason: Reason) -> None:
    assert grade(Item(response, "4")) == Graded(Verdict.SCORED, reason)


def test_only_a_missing_answer_counts_as_truncated() -> None:
    assert grade(Item("still thinking", "4", truncated=True)).reason is Reason.TRUNCATED
    assert grade(Item("</think> so", "4", truncated=True)).reason is Reason.TRUNCATED
    assert grade(Item("</think> \\boxed{4} as", "4", truncated=True)).reason is Reason.CORRECT
    assert grade(Item("</think> \\boxed{5} as", "4", truncated=True)).reason is Reason.WRONG


@pytest.mark.parametrize("label", ["", "\\boxed 4", "\\boxed{4", "\\fbox{4}"])
def test_labels_that_nothing_can_be_graded_against(label: str) -> None:
    assert grade(Item("</think> \\boxed{4}", label)).verdict is Verdict.UNGRADABLE


def test_a_label_may_stand_in_a_box() -> None:
    assert score("4", "the answer is \\boxed{4}") == 1


@pytest.mark.parametrize(
    ("answer", "label", "expected"),
    [
        ("0.5", "\\frac{1}{2}", 1),
        ("1/2", "\\frac12", 1),
        ("2/4", "\\frac{1}{2}", 0),
        ("\\dfrac{3}{4}", "\\tfrac34", 1),
        ("x = 5", "5", 1),
        ("1,234,567", "1234567", 1),
        ("12 \\text{ cm}", "12", 1),
        ("7 3/4", "\\frac{31}{4}", 1),
        ("x(x+1)", "x^2+x", 1),
        ("x(x+1)", "x^2+1", 0),
        ("2\\sqrt{3}", "\\sqrt{12}", 1),
        ("(1, 2)", "(1,2)", 1),
        ("(1, 2]", "(1,2)", 0),
        ("(2, 1)", "(1,2)", 0),
        ("(1/2, \\sqrt{4})", "(\\frac{1}{2}, 2)", 0),
        ("5.0", "5", 1),
        ("\\pi/2", "\\frac{\\pi}{2}", 1),
        ("\\sin x", "\\cos x", 0),
        ("90^\\circ", "90", 1),
        ("50\\%", "50", 1),
        ("Yes", "yes", 1),
        ("", "4", 0),
    ],
)
def test_verdicts(answer: str, label: str, expected: int) -> None:
    assert score(answer, label) == expected


@pytest.mark.parametrize("answer", ["7", "-13", "1,000", "(1,2)", "abc", "12 \\text{ apples}"])
def test_integers_need_no_worker(answer: str) -> None:
    assert isinstance(rule.grade_cheaply(Item(f"</think>\\boxed{{{answer}}}", "7")), Graded)


def test_a_box_of_a_megabyte_is_left_to_a_worker() -> None:
    draft = rule.grade_cheaply(Item("</think>\\boxed{" + "{}" * 500_000 + "}", "7"))
    assert isinstance(draft, Question)


def test_the_digest_is_of_the_source() -> None:
    digest = GRADERS["deepscaler"].digest
    assert len(digest) == 64 and int(digest, 16)


@pytest.mark.parametrize(("require_think", "reason"), [(True, Reason.NO_THINK_TAG), (False, Reason.CORRECT)])
def test_answers_without_thinking_count_where_the_run_says_so(require_think, reason):
    item = Item("The answer is \\boxed{4}.", "4", require_think=require_think)
    graded = GRADERS["deepscaler"].grade_cheaply(item)
    assert isinstance(graded, Graded) and graded.reason is reason
