"""The `ifbench` rule for instructions that can be checked: right if the response follows every one.

`metadata.instruction_id_list` names them, `metadata.kwargs` holds their arguments in the same order. The ids and their
meaning are those of IFEval (Zhou et al. 2023) and IFBench, as far as they need no language model and no download. A row
with any other id is UNGRADABLE. Thinking does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from services.reward.verdicts import Graded, Item, Question, Reason, Verdict

VERSION = "1"
CHEAP_CHARACTERS = 10_000
"""A longer response is left to a worker, since checking it takes milliseconds."""

Arguments = Mapping[str, Any]
_FENCE = re.compile(r"^```(?:json)?|```$", re.IGNORECASE)


def grade_cheaply(item: Item) -> Graded | Question:
    """The verdict, or a long response for a worker."""
    text = item.response.rpartition("</think>")[2].strip()
    ids = item.metadata.get("instruction_id_list")
    kwargs = item.metadata.get("kwargs")
    if not isinstance(ids, list) or not ids:
        return Graded(Verdict.UNGRADABLE)
    kwargs = kwargs or [{}] * len(ids)
    if not isinstance(kwargs, list) or len(kwargs) != len(ids):
        return Graded(Verdict.UNGRADABLE)
    if not text:
        return item.scored(Reason.NO_ANSWER)
    question = Question(text, json.dumps(list(zip(ids, kwargs, strict=True))))
    return question if len(text) > CHEAP_CHARACTERS else decide(question)


def decide(question: Question) -> Graded:
    """The verdict on a response; the label is JSON, pairs of an id and its arguments."""
    try:
        followed = [CHECKS[name](question.answer, given or {}) for name, given in json.loads(question.label)]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        # an unknown instruction, or arguments that it cannot work with
        return Graded(Verdict.UNGRADABLE, failure=f"ifbench: {type(error).__name__}: {error}")
    return Graded(Verdict.SCORED, Reason.CORRECT if all(followed) else Reason.WRONG)


def _compares(count: int, wanted: int, relation: str | None) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


def _has(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def _is_json(text: str, _: Arguments) -> bool:
    with suppress(ValueError, RecursionError):
        json.loads(_FENCE.sub("", text))
        return True
    return False


def _frequency(text: str, given: Arguments) -> bool:
    count = len(re.findall(re.escape(given["keyword"]), text, re.IGNORECASE))
    return _compares(count, int(given["frequency"]), given.get("relation"))


def _paragraphs(text: str, given: Arguments) -> bool:
    return len([one for one in text.split("***") if one.strip()]) == int(given["num_paragraphs"])


def _letter_frequency(text: str, given: Arguments) -> bool:
    count = text.lower().count(str(given["letter"]).lower())
    return _compares(count, int(given["let_frequency"]), given.get("let_relation"))


def _postscript(text: str, given: Arguments) -> bool:
    marker = r"\s?".join(re.escape(one) for one in re.findall(r"\w\.?", given["postscript_marker"]))
    return re.search(rf"{marker}.*", text, re.IGNORECASE) is not None


def _sections(text: str, given: Arguments) -> bool:
    headings = re.findall(rf"{re.escape(given['section_spliter'])}\s?\d+", text)  # spelt so in IFEval
    return len(headings) >= int(given["num_sections"])


def _two_responses(text: str, _: Arguments) -> bool:
    parts = [one.strip() for one in text.split("******")]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _nth_paragraph(text: str, given: Arguments) -> bool:
    paragraphs = [one.strip() for one in text.split("\n\n") if one.strip()]
    at = int(given["nth_paragraph"])
    if len(paragraphs) != int(given["num_paragraphs"]) or not 0 < at <= len(paragraphs):
        return False
    first = re.match(r"[\W_]*([^\W_]*)", paragraphs[at - 1])
    return first is not None and first[1].lower() == str(given["first_word"]).lower()


def _count(pattern: str, argument: str) -> Callable[[str, Arguments], bool]:
    """At least so many matches of the pattern."""
    compiled = re.compile(pattern, re.MULTILINE)
    return lambda text, given: len(compiled.findall(text)) >= int(given[argument])


CHECKS: Mapping[str, Callable[[str, Arguments], bool]] = {
    "keywords:existence": lambda text, given: all(_has(text, one) for one in given["keywords"]),
    "keywords:forbidden_words": lambda text, given: not any(_has(text, one) for one in given["forbidden_words"]),
    "keywords:frequency": _frequency,
    "length_constraints:number_words": lambda text, given: _compares(
        len(re.findall(r"\w+", text)), int(given["num_words"]), given.get("relation")
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "keywords:letter_frequency": _letter_frequency,
    "detectable_content:postscript": _postscript,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:constrained_response": lambda text, _: any(
        f"My answer is {one}." in text for one in ("yes", "no", "maybe")
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, given: text.lower().startswith(given["prompt_to_repeat"].strip().lower()),
    "detectable_format:number_bullet_lists": lambda text, given: (
        len(re.findall(r"^[^\S\n]*+(?:\*[^*]|-)", text, re.MULTILINE)) == int(given["num_bullets"])
    ),
    "detectable_format:number_highlighted_sections": _count(r"\*[^\n*]+\*", "num_highlights"),
    "detectable_format:title": lambda text, _: re.search(r"<<[^\S\n]*+[^\n<>]++>>", text) is not None,
    "detectable_format:json_format": _is_json,
    "detectable_content:number_placeholders": _count(r"\[[^\n\[\]]*\]", "num_placeholders"),
    "change_case:english_capital": lambda text, _: text.isupper(),
    "change_case:english_lowercase": lambda text, _: text.islower(),
    "punctuation:no_comma": lambda text, _: "," not in text,
    "startend:end_checker": lambda text, given: text.strip('"').lower().endswith(given["end_phrase"].strip().lower()),
    "startend:quotation": lambda text, _: len(text) > 1 and text[0] == text[-1] == '"',
    "count:word_count_range": lambda text, given: (
        int(given["min_words"]) <= len(re.findall(r"\b\w+\b", text)) <= int(given["max_words"])
    ),
    "count:unique_word_count": lambda text, given: len(set(re.findall(r"\b\w+\b", text.lower()))) >= int(given["N"]),
}
