"""Grades a file of `{response, label}` rows as the service does, with workers of this process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.prompts import GRADER_KEY
from services.common.spec import RewardSpec
from services.reward.custom import custom_grader
from services.reward.graders import GRADERS, Grader, find_grader
from services.reward.grading import grade_each
from services.reward.pools import Pools
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


def read_rows(path: Path, spec: RewardSpec) -> Iterator[Row]:
    """The rows of a file; empty lines do not count.

    Args:
        path: JSON lines with `response` and `label`; `truncated`, `prompt`, `metadata` and `group_id` are read where
            they are.
        spec: Its grader is that of rows whose `metadata.rm_type` names no other.

    Raises:
        BadRow: A line is not such a row, or its grader is unknown.
        OSError: The file cannot be read.
    """
    own = custom_grader(spec) if spec.is_custom else None
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield _read_row(line, spec, own)
                except (ValueError, RecursionError) as error:
                    raise BadRow(f"{path}:{number}: {error}") from None


def _read_row(line: str, spec: RewardSpec, own: Grader | None) -> Row:
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("a row is a JSON object")
    response, label = (_text(content, name) for name in ("response", "label"))
    metadata = content.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ValueError("`metadata` is not an object")
    name = metadata.get(GRADER_KEY) or spec.grader
    found = own if own and name == spec.grader else find_grader(str(name))
    if found is None:
        raise ValueError(f"unknown grader {name!r}; there are: {', '.join(sorted(GRADERS))}")
    item = Item(
        response,
        label,
        truncated=bool(content.get("truncated", False)),
        require_think=spec.require_think,
        prompt=str(content.get("prompt", "")),
        metadata=metadata,
        group_id=_text(content, "group_id") if spec.custom_per_group else "",
    )
    return Row(content, item, found)


def _text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"`{name}` is not a text" if name in content else f"there is no `{name}`")
    return str(value)


async def grade_rows(rows: Iterator[Row], spec: RewardSpec) -> AsyncIterator[GradedRow]:
    """The rows with their verdicts, in order. Raises BadRow as `read_rows` does, OSError if no worker starts."""
    pools = Pools(spec)
    try:
        await pools.start()
        for batch in _batches(rows):
            graded = await grade_each([(row.grader, row.item) for row in batch], pools.of)
            for row, one in zip(batch, graded, strict=True):
                yield GradedRow(row.content, one, reward_of(one, spec))
    finally:
        await pools.stop()


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows in their order; those of a group, side by side, stay together."""
    batch: list[Row] = []
    for row in rows:
        if len(batch) >= BATCH and (not row.item.group_id or row.item.group_id != batch[-1].item.group_id):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def grade_file(rows: Iterator[Row], spec: RewardSpec, output: Path | None, seen: Callable[[GradedRow], None]) -> None:
    """Grade rows, call `seen` with each, and write them to `output`, which appears once it is complete.

    Raises:
        BadRow: As `read_rows` does; there is no output then.
        OSError: The output cannot be written, or no worker starts.
    """
    if not output:
        return asyncio.run(_each(rows, spec, seen))
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", errors="surrogateescape") as file:

            def write(row: GradedRow) -> None:
                file.write(json.dumps(row.as_dict()) + "\n")
                seen(row)

            asyncio.run(_each(rows, spec, write))
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    return None


async def _each(rows: Iterator[Row], spec: RewardSpec, do: Callable[[GradedRow], None]) -> None:
    async for row in grade_rows(rows, spec):
        do(row)
