"""The graders beside `deepscaler`, each through its rule as the service calls it; nothing is faked.

Functions of the user's own are asked as a worker asks them, in this process. The server of `remote` is a real one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from services.common.spec import RewardSpec
from services.reward.custom import ask_about, custom_grader, find
from services.reward.graders import GRADERS, find_grader
from services.reward.servicer import reward_of
from services.reward.verdicts import Graded, Item, Question, Reason, Verdict

BIG = 1_000_000
CHEAP_S = 0.05
"""Bar for the cheap part on 1 MB: a few milliseconds, with room for a loaded machine."""


def grade(name: str, response: str, label: str = "", **metadata: object) -> Graded:
    grader = find_grader(name)
    assert grader
    draft = grader.grade_cheaply(Item(response, label, metadata=metadata))
    return grader.decide(draft) if isinstance(draft, Question) else draft


def reason(name: str, response: str, label: str = "", **metadata: object) -> str:
    graded = grade(name, response, label, **metadata)
    return graded.reason.value if graded.verdict is Verdict.SCORED else graded.verdict.value


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        (r"so \boxed{4}", "4", "correct"),
        (r"<think>\boxed{4}</think> four", "4", "correct"),
        (r"\boxed{3} no, \boxed{4}", "3", "wrong"),
        (r"\boxed{x+x}", "2x", "correct"),
        ("4", "4", "no_answer"),
        (r"\boxed{4}", "", "ungradable"),
    ],
)
def test_math_reads_the_last_box_wherever_it_stands(response, label, expected):
    assert reason("math", response, label) == expected
    assert reason("boxed_math", response, label) == expected


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Answer: 34", "34", "correct"),
        ("Answer: 3\nanswer:  $34$", "34", "correct"),
        (r"Answer: $\boxed{1,234}$", "1234", "correct"),
        (r"Answer: x = \frac12", r"\frac{1}{2}", "correct"),
        (r"it is \boxed{7}", "7", "correct"),
        ("Answer: 35 degrees", "35", "correct"),
        ("Answer: 35", "34", "wrong"),
        ("34", "34", "no_answer"),
        ("Answer: 34" + " " * 300, "34", "no_answer"),
        ("Answer: 34", " ", "ungradable"),
    ],
)
def test_dapo_reads_the_last_answer_line(response, label, expected):
    assert reason("dapo", response, label) == expected


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("The cat.", "cat", 1.0),
        ("<think>dog</think> a black cat", "the black dog", 0.5),
        ("dog", "cat", 0.0),
        ("yes it is", "yes", 0.0),
        ("cat cat", "cat", 2 / 3),
    ],
)
def test_f1_is_partial_credit(response, label, value):
    graded = grade("f1", response, label)
    assert graded.value == pytest.approx(value) and (graded.reason is Reason.CORRECT) == (value == 1)


def test_the_prefix_boxed_grades_the_box_alone():
    assert grade("boxed_f1", r"a dog? \boxed{cat}", "cat").value == 1
    assert reason("boxed_f1", "cat", "cat") == "no_answer"


@pytest.mark.parametrize(
    ("response", "label", "metadata", "expected"),
    [
        (r"\boxed{C}", "C", {}, "correct"),
        (r"\boxed{\text{(c)}}", "C", {}, "correct"),
        ("A is tempting. The answer is (B).", "B", {}, "correct"),
        ("**Answer:** D", "D", {}, "correct"),
        ("B", "A", {"correct_letter": "B"}, "correct"),
        ("mercury", "Mercury", {"choices": ["Venus", "Mercury"]}, "correct"),
        ("the answer is B", "Mercury", {"choices": ["Venus", "Mercury"]}, "correct"),
        ("the answer is A", "B", {}, "wrong"),
        ("the answer is a matter of taste", "A", {}, "no_answer"),
        ("Answer: F", "A", {}, "no_answer"),
        ("A", "Pluto", {"choices": ["Venus", "Mercury"]}, "ungradable"),
    ],
)
def test_gpqa_finds_the_letter(response, label, metadata, expected):
    assert reason("gpqa", response, label, **metadata) == expected


@pytest.mark.parametrize(
    ("instruction", "arguments", "follows", "breaks"),
    [
        ("keywords:existence", {"keywords": ["tea"]}, "Tea!", "steam"),
        ("keywords:forbidden_words", {"forbidden_words": ["tea"]}, "steam", "Tea"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a a", "a"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a b", "a b c"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*a b*", "a"),
        ("detectable_format:title", None, "<<T>> a", "T a"),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "a: 1"),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[name]", "name"),
        ("change_case:english_capital", {}, "A B", "A b"),
        ("change_case:english_lowercase", {}, "a b", "A b"),
        ("punctuation:no_comma", {}, "a b", "a, b"),
        ("startend:end_checker", {"end_phrase": "the end"}, "It is The end", "the end?"),
        ("startend:quotation", {}, '"a"', "a"),
        ("count:word_count_range", {"min_words": 2, "max_words": 3}, "a b", "a"),
        ("count:unique_word_count", {"N": 2}, "a b", "a a"),
        ("keywords:letter_frequency", {"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "Ab", "Aa"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP. S. b", "a PS"),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "a\np.p.s b", "a P.S."),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Day", "num_sections": 2},
            "Day 1 a Day 2 b",
            "Day 1",
        ),
        ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
        ("combination:two_responses", {}, "a******b", "a******a"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say A."}, "say a. A", "A"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "the"},
            "a\n\n*The* b",
            "the\n\na b",
        ),
    ],
)
def test_ifbench_checks_an_instruction(instruction, arguments, follows, breaks):
    asked: dict[str, Any] = {"instruction_id_list": [instruction], "kwargs": [arguments]}
    assert reason("ifbench", f"<think>,</think>{follows}", "", **asked) == "correct"
    assert reason("ifbench", breaks, "", **asked) == "wrong"


@pytest.mark.parametrize(
    "metadata",
    [
        {"instruction_id_list": []},
        {"instruction_id_list": ["language:response_language"]},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]},
    ],
)
def test_ifbench_cannot_grade_what_it_does_not_know(metadata):
    assert reason("ifbench", "text", **metadata) == "ungradable"


@pytest.mark.parametrize("text", ["a ", "(", "\\boxed{", "*", "answer:", "[<<"])
@pytest.mark.parametrize("name", sorted(GRADERS))
def test_the_cheap_part_is_cheap_on_a_megabyte(name, text):
    response = text * (BIG // len(text))
    asked = {"instruction_id_list": ["detectable_format:title"], "kwargs": [{}]}
    began = time.perf_counter()
    GRADERS[name].grade_cheaply(Item(response, "1", require_think=False, metadata=asked))
    assert time.perf_counter() - began < CHEAP_S


def test_configuration_says_what_a_verdict_is_worth():
    spec = RewardSpec.model_validate({"values": {"wrong": -1, "timeout": -0.5}})
    assert reward_of(Graded(Verdict.SCORED, Reason.WRONG), spec) == -1
    assert reward_of(Graded(Verdict.TIMEOUT), spec) == -0.5
    assert reward_of(Graded(Verdict.SCORED, Reason.WRONG, value=0.25), spec) == 0.25
    assert reward_of(Graded(Verdict.SCORED, Reason.CORRECT), spec) == 1


# ------------------------------------------------------------------------------------------------ the user's own


def length(item: Item) -> float:
    return len(item.response) / 10


async def graded_with_metadata(item: Item) -> dict[str, object]:
    return {"reward": item.metadata["worth"], "more": "ignored"}


def nothing_finite(item: Item) -> float:
    return float("nan")


def ask(name: str, item: Item) -> Graded:
    return find(name)(ask_about(item))


def test_functions_by_import_path_sync_and_async():
    item = Item("ab", "", metadata={"worth": 0.75})
    assert ask(f"{__name__}:length", item) == Graded(Verdict.SCORED, value=0.2)
    assert ask(f"{__name__}:graded_with_metadata", item).value == 0.75
    with pytest.raises(ValueError, match="nan"):
        ask(f"{__name__}:nothing_finite", item)


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, object]]]]:
    asked: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"reward": 0.5}' if self.path == "/dict" else b"1")

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()
        thread.join()


def test_remote_posts_the_item_and_takes_a_number_or_a_dict(server):
    url, asked = server
    spec = RewardSpec.model_validate({"grader": "remote", "remote_url": url})
    item = Item("r", "l", prompt="p", metadata={"a": 1})
    assert ask(custom_grader(spec).target, item).value == 1
    assert ask(f"{url}/dict", item).value == 0.5
    assert asked == [{"prompt": "p", "response": "r", "label": "l", "metadata": {"a": 1}}] * 2
