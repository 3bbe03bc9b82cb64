"""From a TOML file, environment variables and `--set` to a spec, and what is wrong in words."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from services.common.spec.base import SpecError
from services.common.spec.training import LAYOUT_SECTIONS, TrainingSpec

ENV_PREFIX = "FLOTILLA__"
S = TypeVar("S", bound=TrainingSpec)


def read_spec(kind: type[S], path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> S:
    """As `load_run`, a spec of any kind, with its paths as they are given."""
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SpecError(f"{path}: there is no such run spec") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not valid TOML: {error}") from None
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            _set(table, name.removeprefix(ENV_PREFIX).lower().split("__"), environ[name], name)
    return make_spec(kind, table, str(path), overrides)


def make_spec(kind: type[S], table: dict[str, Any], origin: str, overrides: Sequence[str] = ()) -> S:
    """A spec of the fields in `table`, which are changed as `overrides` say. Raises SpecError that names `origin`."""
    for pair in overrides:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SpecError(f"--set {pair}: write section.field=value")
        _set(table, key.strip().split("."), value.strip(), f"--set {pair}")
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise SpecError(explain(origin, error)) from None


def _set(table: dict[str, Any], keys: list[str], text: str, origin: str) -> None:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node: Any = table
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise SpecError(f"{origin}: {'.'.join(keys[:depth])} has no entry {key}")
            if last:
                node[int(key)] = value
            else:
                node = node[int(key)]
        elif not isinstance(node, dict):
            raise SpecError(f"{origin}: {'.'.join(keys[:depth])} is not a section")
        elif last:
            node[key] = value
        else:
            node = node.setdefault(key, {})


def explain(origin: str, error: ValidationError) -> str:
    """One line for each thing that is wrong, with where it was said and the field."""
    lines = []
    for one in error.errors():
        field = ".".join(str(part) for part in one["loc"])
        if one["type"] == "extra_forbidden":
            lines.append(f"{origin}: {field}: unknown key; remove it or correct its spelling")
        elif one["type"] == "missing":
            lines.append(f"{origin}: {field}: missing; add it")
        else:
            lines.append(": ".join(filter(None, (origin, field, one["msg"].removeprefix("Value error, ")))))
    return "\n".join(lines)


def check_same_run(spec: S, file: Path, load: Callable[..., S]) -> None:
    """A run directory belongs to one run: what defines the run must not change when it is continued.

    Args:
        spec: Of today.
        file: What an earlier start wrote into the directory, if there was one.
        load: Reads it.

    Raises:
        SpecError: Another value than then; names the fields.
    """
    if not file.is_file():
        return
    before = load(file, environ={})
    if before.digest() != spec.digest():
        old, new = (one.model_dump(mode="json", exclude=LAYOUT_SECTIONS) for one in (before, spec))
        changed = ", ".join(_differences(old, new))
        raise SpecError(
            f"run_dir: {spec.run_dir} holds a run that was started with other values of {changed}; "
            "take the old values to continue it, or another run_id or run_dir to start anew"
        )


def _differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the fields that differ."""
    found: list[str] = []
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}")
    return found


def resolved_table(spec: TrainingSpec, base: Path) -> dict[str, Any]:
    """The fields of a spec, with absolute paths where every run has paths; relative ones begin at `base`."""
    table = spec.model_dump()
    table["run_dir"] = base / (spec.run_dir if spec.run_dir != Path() else Path("runs") / spec.run_id)
    table["model"]["hf_checkpoint"] = base / spec.model.hf_checkpoint
    if spec.model.load != Path():
        table["model"]["load"] = base / spec.model.load
    return table
