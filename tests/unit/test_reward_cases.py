"""`deepscaler` and `deepscaler_plus` on the labelled cases and on labels of the data sets. Nothing is faked."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from services.reward.graders import deepscaler, deepscaler_plus
from services.reward.graders.plus.compare import same
from services.reward.verdicts import Graded, Item, Question, Reason
from tests.conftest import shared_file

ACCURACY = 0.985
MAX_FALSE_POSITIVES = 1
MAX_SECONDS = 0.5
"""Of processor time, for any case; usual ones take a thousandth of that."""
MAX_QUOTED_CHARACTERS = 12
SERVICES = Path(__file__).resolve().parents[2] / "services"


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shared_file(name).read_text().splitlines()]


def grade(rule: Any, item: Item) -> Graded:
    draft = rule.grade_cheaply(item)
    return item.scored(rule.decide(draft).reason) if isinstance(draft, Question) else draft


def test_strict_mode_agrees_with_the_reference_wherever_that_finishes() -> None:
    rows = [row for row in read_rows("cases/grader_cases.jsonl") if not row["strict_hangs"]]
    verdicts = {
        row["id"]: grade(deepscaler, Item(row["response"], row["label"])).reason is Reason.CORRECT for row in rows
    }
    assert [row["id"] for row in rows if verdicts[row["id"]] != bool(row["strict_deepscaler"])] == []


def test_plus_mode_is_right_on_the_uncontested_cases() -> None:
    rows = [row for row in read_rows("cases/grader_cases.jsonl") if not row["contested"]]
    accepted, refused = [], []
    for row in rows:
        correct = (
            grade(deepscaler_plus, Item(row["response"], row["label"], require_think=False)).reason is Reason.CORRECT
        )
        if correct != bool(row["expected"]):
            (accepted if correct else refused).append(row["id"])
    assert len(accepted) <= MAX_FALSE_POSITIVES, accepted
    assert len(accepted) + len(refused) <= (1 - ACCURACY) * len(rows), refused


def test_no_case_takes_plus_mode_long() -> None:
    slow = []
    for row in read_rows("cases/grader_cases.jsonl"):
        start = time.process_time()
        grade(deepscaler_plus, Item(row["response"], row["label"]))
        if time.process_time() - start > MAX_SECONDS:
            slow.append(row["id"])
    assert slow == []


def test_no_case_is_quoted_in_the_source() -> None:
    source = "\n".join(path.read_text() for path in sorted(SERVICES.rglob("*.py")))
    quoted = [
        row["id"]
        for row in read_rows("cases/grader_cases.jsonl")
        for text in {row["response"], row["label"]}
        if len(text) > MAX_QUOTED_CHARACTERS and (text in source or repr(text)[1:-1] in source)
    ]
    assert quoted == []


TRULY_EQUAL = {
    frozenset(pair)
    for pair in [
        ("\\frac58", "\\frac{5}{8}"),
        ("1\\frac{2}{3}", "\\frac{5}{3}"),
    ]
}
"""The pairs that come up below and are the same number."""


def test_of_random_pairs_of_different_labels_only_equal_ones_are_accepted() -> None:
    names = ("math-train-deepscaler", "deepmath-5k", "math-500")
    labels = sorted({row["label"] for name in names for row in read_rows(f"data/{name}.jsonl")})
    drawn = random.Random(1)
    pairs = [drawn.sample(labels, 2) for _ in range(5000)]
    assert [pair for pair in pairs if same(*pair) and frozenset(pair) not in TRULY_EQUAL] == []


def test_every_label_of_the_data_sets_is_equal_to_itself() -> None:
    names = ("math-train-deepscaler", "deepmath-5k", "math-500")
    labels = {row["label"] for name in names for row in read_rows(f"data/{name}.jsonl")}
    assert [label for label in sorted(labels) if not same(label, label)] == []


@pytest.mark.parametrize("shift", [0, 7])
def test_reference_solutions_are_right_by_their_own_label_only(shift: int) -> None:
    rows = read_rows("data/math-500.jsonl")
    differing = []
    for row, other in zip(rows, rows[shift:] + rows[:shift], strict=True):
        item = Item(f"<think>x</think>{row['metadata']['solution']}", other["label"])
        if (grade(deepscaler_plus, item).reason is Reason.CORRECT) != (row["label"] == other["label"]):
            differing.append((row["label"], other["label"]))
    assert differing == []
