"""The word problems: determinism, labels, and that nothing held out is shown in training.

Nothing is faked. Sums are derived anew from the texts by the small parser below, which shares nothing with the demo.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from random import Random

import pytest

from demo import data
from demo.problems import CARELESS_TEACHER, Split, Sum, Teacher, draw_drill, draw_problem, work

SHOWN_SUM = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")
READINGS = [
    (r"has (\d+) \w+ and buys (\d+) more\.", "+"),
    (r"There are (\d+) \w+ on the table\. \w+ adds (\d+) \w+\. How", "+"),
    (r"finds (\d+) \w+ today and (\d+) ", "+"),
    (r"has (\d+) \w+ and gives (\d+) to", "-"),
    (r"There are (\d+) \w+ on the table\. \w+ takes (\d+)", "-"),
    (r"had (\d+) \w+ and lost (\d+)", "-"),
    (r"There are (\d+) \w+ with (\d+) \w+ in each\. How", "*"),
    (r"buys (\d+) \w+ of \w+\. Each holds (\d+)", "*"),
    (r"has (\d+) \w+\. \w+ has (\d+) more", "+"),
    (r"has (\d+) \w+\. \w+ has (\d+) fewer", "-"),
    (r"has (\d+) \w+, buys (\d+) more and then gives (\d+)", "+-"),
    (r"There are (\d+) \w+ on the table\. \w+ adds (\d+) \w+ and \w+ takes (\d+)", "+-"),
    (r"There are (\d+) \w+ with (\d+) \w+ in each and (\d+) more", "*+"),
    (r"buys (\d+) \w+ of (\d+) \w+ each and then finds (\d+)", "*+"),
    (r"has (\d+) \w+, gives (\d+) to \w+ and loses (\d+)", "--"),
]


def is_held_out(left: int, operation: str, right: int) -> bool:
    pair = f"{min(left, right)}{operation}{max(left, right)}"
    return operation in "+-" and zlib.crc32(pair.encode()) % 8 == 0


def calculate(left: int, operation: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


def read(text: str) -> tuple[list[tuple[int, str, int]], int]:
    """The sums that a problem asks for, and its answer."""
    found = [(match, operations) for pattern, operations in READINGS if (match := re.search(pattern, text))]
    assert len(found) == 1, text
    match, operations = found[0]
    value, *operands = map(int, match.groups())
    sums = []
    for operation, operand in zip(operations, operands, strict=True):
        sums.append((value, operation, operand))
        value = calculate(*sums[-1])
    return sums, value


def test_labels_are_right_and_every_number_of_the_text_counts() -> None:
    for split in Split:
        for row in data.prompt_rows(split, 3000, seed=1):
            sums, answer = read(row["prompt"][0]["content"])
            assert row["label"] == str(answer)
            assert answer > 0
            assert len(re.findall(r"\d+", row["prompt"][0]["content"])) == len(sums) + 1


def test_training_prompts_contain_no_held_out_sum_and_held_out_ones_at_least_one() -> None:
    for row in data.prompt_rows(Split.TRAINING, 4096, seed=0):
        assert not any(is_held_out(*one) for one in read(row["prompt"][0]["content"])[0])
    for row in data.prompt_rows(Split.HELD_OUT, 1000, seed=0):
        assert any(is_held_out(*one) for one in read(row["prompt"][0]["content"])[0])


def shown_sums(text: str) -> list[tuple[int, str, int]]:
    return [(int(left), operation, int(right)) for left, operation, right, _ in SHOWN_SUM.findall(text)]


def test_worked_answers_show_no_held_out_sum_even_in_mistakes() -> None:
    random = Random(3)
    shown = 0
    for _ in range(5000):
        problem = draw_problem(random, Split.TRAINING, 0.5)
        sums = shown_sums(work(problem, random, CARELESS_TEACHER))
        shown += len(sums)
        assert not any(is_held_out(*one) for one in sums)
    assert shown > 5000


def test_drill_sheets_show_no_held_out_sum_and_are_right() -> None:
    random = Random(4)
    for _ in range(1500):
        pieces = draw_drill(random)
        text = "".join(piece.text for piece in pieces)
        sums = shown_sums(text)
        assert len(sums) == 8
        assert not any(is_held_out(*one) for one in sums)
        assert [str(calculate(*one)) for one in sums] == [piece.text for piece in pieces if piece.learn]


def test_one_sum_in_eight_is_held_out_and_both_orders_fall_on_the_same_side() -> None:
    pairs = [(left, right) for left in range(2, 101) for right in range(2, 51)]
    held_out = {pair: Sum(pair[0], "+", pair[1]).held_out for pair in pairs}
    assert sum(held_out.values()) / len(pairs) == pytest.approx(1 / 8, abs=0.01)
    assert all(side == Sum(right, "+", left).held_out for (left, right), side in held_out.items())
    assert not any(Sum(left, "*", right).held_out for left, right in pairs)


def test_a_perfect_teacher_is_right_and_a_careless_one_often_not() -> None:
    random = Random(5)
    right = {"perfect": 0, "careless": 0}
    for _ in range(2000):
        problem = draw_problem(random, Split.TRAINING, 0.25)
        ending = f"</think> \\boxed{{{read(problem.text)[1]}}}"
        right["perfect"] += work(problem, random, Teacher()).endswith(ending)
        right["careless"] += work(problem, random, CARELESS_TEACHER).endswith(ending)
    assert right["perfect"] == 2000
    assert 0.5 < right["careless"] / 2000 < 0.75


def test_half_of_the_prompts_have_two_steps() -> None:
    steps = [row["metadata"]["steps"] for row in data.prompt_rows(Split.TRAINING, 4000, seed=2)]
    assert steps.count(2) / len(steps) == pytest.approx(0.5, abs=0.05)


def test_prompt_files_depend_on_the_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        data.write_prompts(tmp_path / name, Split.TRAINING, 200, seed)
    first, again, other = ((tmp_path / name).read_text() for name in "abc")
    assert first == again != other
    assert {frozenset(json.loads(line)) for line in first.splitlines()} == {frozenset({"prompt", "label", "metadata"})}
