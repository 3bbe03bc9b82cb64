"""Grades a file of `{response, label}` rows as the service does, with a worker pool in this process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from services.common.prompts import GRADER_KEY
from services.common.spec import RewardSpec
from services.reward.graders import GRADERS, Grader, find_grader
from services.reward.grading import grade_each
from services.reward.pool import WorkerPool
from services.reward.servicer import reward_of
from services.reward.verdicts import Graded, Item

BATCH = 256
"""Rows that are graded at a time."""


class BadRow(ValueError):
    """A row that cannot be graded; says its file and line."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the file."""

    content: Mapping[str, Any]
    item: Item
    grader: Grader


@dataclass(frozen=True, slots=True)
class GradedRow:
    """A row with its verdict and what that is worth by default."""

    content: Mapping[str, Any]
    graded: Graded
    value: float

    def as_dict(self) -> dict[str, Any]:
        """The row of the output: the other fields of the input pass through."""
        return {
            **self.content,
            "value": self.value,
            "verdict": self.graded.verdict.name,
            "reason": self.graded.reason.name,
            "seconds": round(self.graded.seconds, 6),
        }


def read_rows(path: Path, grader: str, require_think: bool) -> Iterator[Row]:
    """The rows of a file; empty lines do not count.

    Args:
        path: JSON lines with `response` and `label`; `truncated`, `prompt` and `metadata` are read where they are.
        grader: For rows whose `metadata.rm_type` names no other.
        require_think: See Item.

    Raises:
        BadRow: A line is not such a row, or its grader is unknown.
        OSError: The file cannot be read.
    """
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield _read_row(line, grader, require_think)
                except (ValueError, RecursionError) as error:
                    raise BadRow(f"{path}:{number}: {error}") from None


def _read_row(line: str, grader: str, require_think: bool) -> Row:
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("a row is a JSON object")
    response, label = (_text(content, name) for name in ("response", "label"))
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError("`metadata` is not an object")
    name = metadata.get(GRADER_KEY) or grader
    found = find_grader(str(name))
    if found is None:
        raise ValueError(f"unknown grader {name!r}; there are: {', '.join(sorted(GRADERS))}")
    item = Item(
        response,
        label,
        truncated=bool(content.get("truncated", False)),
        require_think=require_think,
        prompt=str(content.get("prompt", "")),
        metadata=metadata,
    )
    return Row(content, item, found)


def _text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"`{name}` is not a text" if name in content else f"there is no `{name}`")
    return str(value)


async def grade_rows(rows: Iterator[Row], workers: int, timeout_s: float) -> AsyncIterator[GradedRow]:
    """The rows with their verdicts, in order. Raises BadRow as `read_rows` does, OSError if no worker starts."""
    pool, spec = WorkerPool(workers, timeout_s, max_queue=BATCH), RewardSpec()
    try:
        await pool.start()
        while batch := list(islice(rows, BATCH)):
            for row, graded in zip(
                batch, await grade_each([(one.grader, one.item) for one in batch], lambda _: pool), strict=True
            ):
                yield GradedRow(row.content, graded, reward_of(graded, spec))
    finally:
        await pool.stop()


def grade_file(
    rows: Iterator[Row], output: Path | None, workers: int, timeout_s: float, seen: Callable[[GradedRow], None]
) -> None:
    """Grade rows, call `seen` with each, and write them to `output`, which appears once it is complete.

    Raises:
        BadRow: As `read_rows` does; there is no output then.
        OSError: The output cannot be written, or no worker starts.
    """
    if not output:
        return asyncio.run(_each(rows, workers, timeout_s, seen))
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", errors="surrogateescape") as file:

            def write(row: GradedRow) -> None:
                file.write(json.dumps(row.as_dict()) + "\n")
                seen(row)

            asyncio.run(_each(rows, workers, timeout_s, write))
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    return None


async def _each(rows: Iterator[Row], workers: int, timeout_s: float, do: Callable[[GradedRow], None]) -> None:
    async for row in grade_rows(rows, workers, timeout_s):
        do(row)
