"""`flotilla grade` on small files. Nothing is faked: its worker pool is a real one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from services.cli.main import app
from tests.reward_service import slow_sums

Content = dict[str, Any]


def row(answer: str, label: str = "2x", **others: object) -> Content:
    return {"response": f"<think>so</think> \\boxed{{{answer}}}", "label": label, **others}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows))
    return path


def run(*arguments: object, grader: str = "deepscaler") -> Result:
    return CliRunner().invoke(app, ["grade", "--grader", grader, "--workers", "2", *map(str, arguments)])


def test_each_row_gets_its_verdict_in_order_and_keeps_its_fields(tmp_path: Path) -> None:
    rows = [
        row("x+x", id="a", expected=1),
        row(*slow_sums(0), id="b", expected=0),
        row("3x", id="c", expected=1),
        row("2x", id="d", expected=0),
        row("1", "", id="e"),
        {"response": "hm", "label": 7, "id": "f", "truncated": True},
    ]
    done = run(write(tmp_path / "in.jsonl", *rows), "--output", tmp_path / "out.jsonl", "--timeout", "0.5")
    assert done.exit_code == 0, done.output
    graded = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(one["id"], one["value"], one["verdict"], one["reason"]) for one in graded] == [
        ("a", 1.0, "SCORED", "CORRECT"),
        ("b", 0.0, "TIMEOUT", "UNSPECIFIED"),
        ("c", 0.0, "SCORED", "WRONG"),
        ("d", 1.0, "SCORED", "CORRECT"),
        ("e", 0.0, "UNGRADABLE", "UNSPECIFIED"),
        ("f", 0.0, "SCORED", "TRUNCATED"),
    ]
    assert graded[1]["seconds"] == pytest.approx(0.5, abs=0.3)
    assert [{**one, **given} for one, given in zip(graded, rows, strict=True)] == graded
    assert [one.get("right") for one in graded] == [True, True, False, False, None, None]
    assert graded[1]["error"] == "deepscaler: no answer within 0.5 s"
    assert "accuracy 50.00% of 4 rows" in done.output
    assert "1 false positives, 1 false negatives, 1 without a score" in done.output


def test_no_require_think_grades_the_whole_response(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", {"response": "\\boxed{4}", "label": "4"})
    assert "NO_THINK_TAG" in run(file).output
    assert "CORRECT" in run(file, "--no-require-think").output


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "Expecting"),
        ("[]", "object"),
        ({"response": "x"}, "no `label`"),
        ({"response": ["x"], "label": "x"}, "`response` is neither text nor a number"),
        (row("1", metadata={"rm_type": "vibes"}), "unknown grader 'vibes'"),
        (row("1", expected="yes"), "`expected` is neither 0 nor 1"),
        (row("1", truncated="no"), "`truncated` is neither true nor false"),
    ],
)
def test_a_bad_row_is_named_before_anything_is_written(tmp_path: Path, bad: object, said: str) -> None:
    file = write(tmp_path / "in.jsonl", row("1"), "", bad)
    done = run(file, "--output", tmp_path / "out.jsonl")
    assert done.exit_code == 2
    assert f"{file}:3: " in done.output
    assert said in done.output
    assert list(tmp_path.iterdir()) == [file]


def test_an_unknown_grader_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    assert "there are: " in run(write(tmp_path / "in.jsonl", row("1")), grader="vibes").output
    assert run(tmp_path / "none.jsonl").exit_code == 2


def test_an_empty_file_gives_an_empty_file(tmp_path: Path) -> None:
    assert run(write(tmp_path / "in.jsonl"), "--output", tmp_path / "out.jsonl").exit_code == 0
    assert (tmp_path / "out.jsonl").read_text() == ""


OWN = """
def length(item):
    return {"reward": len(item.response) / len(item.label)}

OWN = "no function"

def share(items):
    return [1 / len(items)] * len(items)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "length_reward.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def values(tmp_path: Path) -> list[float]:
    return [json.loads(line)["value"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_a_function_of_the_users_own_grades_beside_a_rows_own_choice(tmp_path: Path, own: None) -> None:
    rows = [{"response": "ab", "label": "abcd"}, row("x+x", metadata={"rm_type": "deepscaler_plus"})]
    done = run(write(tmp_path / "in.jsonl", *rows), "--output", tmp_path / "out.jsonl", grader="length_reward:length")
    assert done.exit_code == 0, done.output
    assert values(tmp_path) == [0.5, 1.0]


def test_groups_stay_together_whatever_their_size(tmp_path: Path, own: None) -> None:
    rows = [{"response": "r", "label": "l", "group_id": group} for group in ["a"] * 200 + ["b"] * 100 + ["c"] * 4]
    done = run(
        *(write(tmp_path / "in.jsonl", *rows), "--per-group", "--output", tmp_path / "out.jsonl"),
        grader="length_reward:share",
    )
    assert done.exit_code == 0, done.output
    assert values(tmp_path) == [1 / 200] * 200 + [1 / 100] * 100 + [1 / 4] * 4


def test_a_group_that_is_torn_apart_is_refused(tmp_path: Path) -> None:
    rows = [{"response": "r", "label": "l", "group_id": group} for group in "aba"]
    done = run(write(tmp_path / "in.jsonl", *rows), "--per-group", grader="length_reward:share")
    assert done.exit_code == 2
    assert "in.jsonl:3: `group_id` 'a' was there before" in done.output


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        ("length_reward:lenght", "AttributeError: module 'length_reward' has no attribute 'lenght'"),
        ("lenght_reward:length", "ModuleNotFoundError: No module named 'lenght_reward'"),
        ("length_reward:OWN", "TypeError: length_reward:OWN is no function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused(tmp_path: Path, own: None, grader: str, said: str) -> None:
    done = run(write(tmp_path / "in.jsonl", row("1")), "--output", tmp_path / "out.jsonl", grader=grader)
    assert done.exit_code == 2
    assert f"reward.grader: {grader}: {said}" in done.output
    assert not (tmp_path / "out.jsonl").exists()


def test_the_output_may_be_a_link_or_no_file_at_all(tmp_path: Path) -> None:
    file, target = write(tmp_path / "in.jsonl", row("2x")), tmp_path / "target.jsonl"
    (tmp_path / "link").symlink_to(target)
    assert run(file, "--output", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink() and json.loads(target.read_text())["value"] == 1.0
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        assert run(file, "--output", tmp_path / "pipe").exit_code == 0
        assert json.loads(reader.communicate(timeout=10)[0])["value"] == 1.0
    assert run(file, "--output", tmp_path).exit_code == 2
    assert run(tmp_path / "pipe").exit_code == 2


def test_options_that_do_not_fit_the_grader_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", row("1"))
    assert "remote_url" in run(file, grader="remote").output
    assert "custom_per_group" in run(file, "--per-group").output
    assert "no `group_id`" in run(file, "--per-group", grader="length_reward:share").output
