"""The graders that there are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from services.common.spec import BOXED, BUILT_IN_GRADERS
from services.reward.graders import (
    dapo,
    deepscaler,
    deepscaler_plus,
    expressions,
    f1,
    gpqa,
    ifbench,
    latex_symbols,
    latex_text,
    math,
    plus,
    symbolic,
)
from services.reward.verdicts import Graded, Item, Question, Reason


@dataclass(frozen=True, slots=True)
class Grader:
    """A rule in two parts: a cheap one for the service itself, and one for workers, which may take any time."""

    name: str
    version: str
    digest: str
    """SHA-256 of the source of the rule, in hexadecimal."""
    grade_cheaply: Callable[[Item], Graded | Question]
    decide: Callable[[Question], Graded]
    ask_about_group: Callable[[Sequence[Item]], Question] | None = None
    """Set in a rule that judges the items of a group together: the question about all of them, instead of the cheap
    part."""
    target: str = ""
    """What workers find it by, if that is not its name."""


def _digest(*modules: ModuleType) -> str:
    sources = (path.read_bytes() for module in modules for path in _files(Path(str(module.__file__))))
    return hashlib.sha256(b"".join(sources)).hexdigest()


def _files(path: Path) -> list[Path]:
    """The source of a module; that of a package is all of its files."""
    return sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]


def _undecided(question: Question) -> Graded:
    raise AssertionError("this rule asks no worker")


def _grader(rule: ModuleType, *parts: ModuleType) -> Grader:
    name = rule.__name__.rpartition(".")[2]
    decide = getattr(rule, "decide", _undecided)
    return Grader(name, rule.VERSION, _digest(rule, *parts), rule.grade_cheaply, decide)


_DEEPSCALER = (deepscaler, latex_text, latex_symbols, symbolic)
_RULES = (
    _grader(*_DEEPSCALER),
    _grader(deepscaler_plus, plus, expressions),
    _grader(math, *_DEEPSCALER),
    _grader(dapo, deepscaler),
    _grader(f1),
    _grader(gpqa, deepscaler),
    _grader(ifbench),
)
GRADERS = {one.name: one for one in _RULES}
assert set(GRADERS) == set(BUILT_IN_GRADERS), (
    "a run spec is checked against the names in services/common/spec/reward.py"
)

READ_THE_WHOLE_TEXT = {"f1", "ifbench"}
"""Rules that do not look for a box of their own; to the others the prefix makes no difference."""


def find_grader(name: str) -> Grader | None:
    """The grader of this name, which may begin with `boxed_`: then only the last box is graded, without its braces."""
    grader = GRADERS.get(name.removeprefix(BOXED))
    if grader is None or not name.startswith(BOXED) or grader.name not in READ_THE_WHOLE_TEXT:
        return grader
    return _boxed(grader)


@lru_cache
def _boxed(grader: Grader) -> Grader:
    rule = grader.grade_cheaply

    def of_box(item: Item) -> Graded | Question:
        box = deepscaler.find_box(item.response, require_think=False)
        inside = None if isinstance(box, Reason) else deepscaler.open_box(box)
        return item.scored(Reason.NO_ANSWER) if inside is None else rule(replace(item, response=inside))

    return replace(grader, grade_cheaply=of_box)
