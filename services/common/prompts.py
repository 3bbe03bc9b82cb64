"""Rows of a prompt file: JSON lines or Parquet, each checked before anything uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    for number, row in _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path):
        where = f"{path}:{number}"
        _check_text(row, where)
        prompt = _field(row, data.input_key, where)
        if not isinstance(prompt, str) and not _are_messages(prompt):
            raise SpecError(f"{where}: field {data.input_key!r} must be text or a list of {{role, content}} messages")
        if not isinstance(prompt, str) and not data.apply_chat_template:
            raise SpecError(f"{where}: field {data.input_key!r} holds messages; set data.apply_chat_template = true")
        if not prompt:
            raise SpecError(f"{where}: field {data.input_key!r} is empty")
        label = _field(row, data.label_key, where)
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


def _check_text(row: dict[str, Any], where: str) -> None:
    """Half of a surrogate pair is valid JSON and no text."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise SpecError(f"{where}: a text in the row holds half of a surrogate pair, which is not Unicode") from None


def check_rows(field: str, path: Path, data: DataSpec) -> int:
    """Read a whole file; returns its number of rows. Raises SpecError also if there is none; `field` names it then."""
    count = sum(1 for _ in read_rows(path, data))
    if not count:
        raise SpecError(f"{field}: {path} is empty; write one JSON object a line")
    return count


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _json_object(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: not valid JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(row, dict):
        raise SpecError(f"{where}: a row must be a JSON object, this is a {type(row).__name__}")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    from pyarrow import ArrowInvalid, parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (OSError, ArrowInvalid) as error:
        raise SpecError(f"{path}: not a Parquet file: {error}") from None


def _field(row: dict[str, Any], key: str, where: str) -> Any:
    if row.get(key) is None:
        raise SpecError(f"{where}: no field {key!r}; the row has {sorted(row)}")
    return row[key]


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
            for one in value
        )
    )
