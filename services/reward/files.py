"""Grades a file of `{response, label}` rows as the service does, with workers of this process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from services.common.prompts import GRADER_KEY
from services.common.spec import RewardSpec
from services.reward.custom import custom_grader
from services.reward.graders import GRADERS, Grader, find_grader
from services.reward.grading import grade_each
from services.reward.pools import Pools
from services.reward.servicer import reward_of
from services.reward.verdicts import Graded, Item

EXPECTED_KEY = "expected"
RIGHT_FROM = 0.5
"""A value above it says that the response is right, as `expected` does with 1."""
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
        row = {
            **self.content,
            "value": self.value,
            "verdict": self.graded.verdict.name,
            "reason": self.graded.reason.name,
            "seconds": round(self.graded.seconds, 6),
        }
        if self.right is not None:
            row["right"] = self.right
        return {**row, "error": self.graded.failure} if self.graded.failure else row

    @property
    def right(self) -> bool | None:
        """Whether the value says what the row's `expected` says; None without that."""
        expected = self.content.get(EXPECTED_KEY)
        return None if expected is None else bool(expected) == (self.value > RIGHT_FROM)


def read_rows(path: Path, spec: RewardSpec) -> Iterator[Row]:
    """The rows of a file; empty lines do not count.

    Args:
        path: JSON lines with `response` and `label`; `truncated`, `prompt`, `metadata`, `group_id` and `expected` are
            read where they are.
        spec: Its grader is that of rows whose `metadata.rm_type` names no other.

    Raises:
        BadRow: A line is not such a row, its grader is unknown, or the rows of a group do not stand side by side.
        OSError: The file cannot be read.
    """
    own = custom_grader(spec) if spec.is_custom else None
    if path.exists() and not path.is_file():
        raise BadRow(f"{path}: is no regular file; rows are read twice, to check all before any is graded")
    ended, group = set[str](), ""
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = _read_row(line, spec, own)
                    if row.item.group_id != group:
                        ended.add(group)
                        group = row.item.group_id
                    if spec.custom_per_group and group in ended:
                        raise ValueError(f"`group_id` {group!r} was there before; put the rows of a group side by side")
                except (ValueError, RecursionError) as error:
                    raise BadRow(f"{path}:{number}: {error}") from None
                yield row


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
    prompt, expected = content.get("prompt") or "", content.get(EXPECTED_KEY)
    if expected not in (None, 0, 1) or isinstance(expected, str):
        raise ValueError(f"`{EXPECTED_KEY}` is neither 0 nor 1")
    if not isinstance(truncated := content.get("truncated") or False, bool | int):
        raise ValueError("`truncated` is neither true nor false")
    item = Item(
        response,
        label,
        truncated=bool(truncated),
        require_think=spec.require_think,
        prompt=prompt if isinstance(prompt, str) else json.dumps(prompt),
        metadata=metadata,
        group_id=_text(content, "group_id") if spec.custom_per_group or "group_id" in content else "",
    )
    return Row(content, item, found)


def _text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"`{name}` is neither text nor a number" if name in content else f"there is no `{name}`")
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

    What is no file, such as /dev/stdout, is written to as rows are graded. A link is followed.

    Raises:
        BadRow: As `read_rows` does; there is no output then.
        OSError: The output cannot be written, or no worker starts.
        SpecError: The grader cannot be loaded.
    """
    if not output:
        return asyncio.run(_each(rows, spec, seen))
    output = output.resolve()
    if output.exists() and not output.is_file():
        with output.open("w", encoding="utf-8", errors="surrogateescape") as stream:
            return asyncio.run(_each(rows, spec, _writing(stream, seen)))
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8", errors="surrogateescape") as file:
            asyncio.run(_each(rows, spec, _writing(file, seen)))
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    return None


def _writing(stream: TextIO, seen: Callable[[GradedRow], None]) -> Callable[[GradedRow], None]:
    def write(row: GradedRow) -> None:
        stream.write(json.dumps(row.as_dict()) + "\n")
        seen(row)

    return write


async def _each(rows: Iterator[Row], spec: RewardSpec, do: Callable[[GradedRow], None]) -> None:
    async for row in grade_rows(rows, spec):
        do(row)
