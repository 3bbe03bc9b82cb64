"""The same prompts before and after training, side by side. Pure: rows of two evaluations in, Markdown out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from services.cli.records import Row

MOST_PAIRS = 6
RIGHT_REWARD = 0.5
"""A response with at least this reward is right."""
KINDS = ("wrong, became right", "wrong, stayed wrong", "right, became wrong", "right, stayed right")
"""Taken in turn, so that a transcript shows failures as well as what was learned."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt and its two responses."""

    before: Row
    after: Row

    @property
    def kind(self) -> str:
        """What became of it, one of KINDS."""
        was, now = (row["reward"] >= RIGHT_REWARD for row in (self.before, self.after))
        return f"{'right' if was else 'wrong'}, {'stayed' if was == now else 'became'} {'right' if now else 'wrong'}"


def match_pairs(before: Sequence[Row], after: Sequence[Row]) -> list[Pair]:
    """Rows of the same data set, prompt and sample number, in the order of the first evaluation."""
    later = {_identity(row): row for row in after}
    return [Pair(row, later[_identity(row)]) for row in before if _identity(row) in later]


def _identity(row: Row) -> tuple[str, str, int]:
    return row["name"], row["prompt"], row["sample_index"]


def choose_pairs(pairs: Sequence[Pair], most: int = MOST_PAIRS) -> list[Pair]:
    """At most `most` pairs, one kind after another as long as there are any."""
    by_kind = [[pair for pair in pairs if pair.kind == kind] for kind in KINDS]
    chosen: list[Pair] = []
    for turn in range(most):
        chosen += [kind[turn] for kind in by_kind if turn < len(kind)]
    return chosen[:most]


def render_transcripts(run_id: str, pairs: Sequence[Pair], before_step: int, after_step: int) -> str:
    """A Markdown page of prompts with both responses."""
    parts = [f"# Transcripts of {run_id}", f"Responses after step {before_step} and after step {after_step}."]
    for number, pair in enumerate(pairs, 1):
        parts += [
            f"## {number}. {pair.kind}",
            f"Prompt (label `{pair.before['label']}`):\n\n{fenced(pair.before['prompt'])}",
            f"After step {before_step}, reward {pair.before['reward']:g}:\n\n{fenced(pair.before['response'])}",
            f"After step {after_step}, reward {pair.after['reward']:g}:\n\n{fenced(pair.after['response'])}",
        ]
    return "\n\n".join(parts) + "\n"


def fenced(text: str) -> str:
    """A code block that no run of backticks inside can end."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text}\n{fence}"
