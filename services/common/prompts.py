"""Rows of a prompt file: JSON lines or Parquet, each checked before anything uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.rows import field_of, read_objects
from services.common.spec import DataSpec, SpecError, check_built_in

GRADER_KEY = "rm_type"
"""In the metadata of a row: the name of the grader for it, as for slime."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row."""

    number: int
    """Line (JSON lines) or row (Parquet) in the file, from 1."""
    prompt: str | list[dict[str, str]]
    """Text, or messages with role and content."""
    label: str
    metadata: dict[str, Any]
    """For the grader; empty where the row has none."""


def read_rows(path: Path, data: DataSpec) -> Iterator[Row]:
    """The rows of a file, in order; Parquet if it ends in .parquet.

    Raises:
        SpecError: The file cannot be read, or a row is malformed: names file, row and field.
    """
    for number, row in read_objects(path):
        where = f"{path}:{number}"
        prompt = field_of(row, data.input_key, where)
        if not isinstance(prompt, str) and not _are_messages(prompt):
            raise SpecError(f"{where}: field {data.input_key!r} must be text or a list of {{role, content}} messages")
        if not isinstance(prompt, str) and not data.apply_chat_template:
            raise SpecError(f"{where}: field {data.input_key!r} holds messages; set data.apply_chat_template = true")
        if not prompt:
            raise SpecError(f"{where}: field {data.input_key!r} is empty")
        label = field_of(row, data.label_key, where)
        if label == "":
            raise SpecError(f"{where}: field {data.label_key!r} is empty: no response could be graded against it")
        if isinstance(label, bool) or not isinstance(label, str | int | float):
            kind = type(label).__name__
            raise SpecError(f"{where}: field {data.label_key!r} must be text or a number, this is a {kind}")
        yield Row(number, prompt, str(label), _metadata(row, data.metadata_key, where))


def _metadata(row: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    metadata = row.get(key) or {}
    if not isinstance(metadata, dict):
        raise SpecError(f"{where}: field {key!r} must be an object, this is a {type(metadata).__name__}")
    try:
        json.dumps(metadata)
        if metadata.get(GRADER_KEY):
            check_built_in(str(metadata[GRADER_KEY]))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where}: field {key!r}: {error}") from None
    return metadata


def check_rows(field: str, path: Path, data: DataSpec) -> int:
    """Read a whole file; returns its number of rows. Raises SpecError also if there is none; `field` names it then."""
    count = sum(1 for _ in read_rows(path, data))
    if not count:
        raise SpecError(f"{field}: {path} is empty; write one JSON object a line")
    return count


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
            for one in value
        )
    )
