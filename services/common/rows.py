"""Rows of a data file: JSON lines, or Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.common.spec import SpecError


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file with their numbers from 1, in order; Parquet if it ends in .parquet.

    Raises:
        SpecError: The file cannot be read, or a row is no object of texts: names file and row.
    """
    for number, row in _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path):
        _check_text(row, f"{path}:{number}")
        yield number, row


def field_of(row: dict[str, Any], key: str, where: str) -> Any:
    """A field that must be there. Raises SpecError, which begins with `where`."""
    if row.get(key) is None:
        raise SpecError(f"{where}: no field {key!r}; the row has {sorted(row)}")
    return row[key]


def _check_text(row: dict[str, Any], where: str) -> None:
    """Half of a surrogate pair is valid JSON and no text."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise SpecError(f"{where}: a text in the row holds half of a surrogate pair, which is not Unicode") from None


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
