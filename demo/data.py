"""Prompt files of the demo: JSON lines with `prompt` (messages), `label` and `metadata`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from demo.problems import Problem, Split, draw_problem

TRAINING_ROWS = 4096
"""More than 40 steps of 32 prompts use, so that none is seen twice."""
HELD_OUT_ROWS = 256
TWO_STEP_SHARE = 0.5


def write_prompts(path: Path, split: Split, rows: int, seed: int) -> None:
    """Write problems of one side of the split; the same file for the same arguments."""
    path.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows(split, rows, seed)))


def prompt_rows(split: Split, rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """The rows of a prompt file."""
    random = Random(f"{split.value} {seed}")
    for _ in range(rows):
        yield _row(draw_problem(random, split, TWO_STEP_SHARE))


def _row(problem: Problem) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": problem.text}],
        "label": str(problem.answer),
        "metadata": {"kind": problem.kind.name, "steps": len(problem.kind.operations)},
    }
