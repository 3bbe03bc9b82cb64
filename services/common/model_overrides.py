"""`model.overrides` of a run spec: fields of config.json with other values, for trainer and engines alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.spec import SpecError

FREE_FIELDS = (
    "max_position_embeddings",
    "n_group",
    "num_experts_per_tok",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "routed_scaling_factor",
    "topk_group",
)
"""Those on which no tensor of a checkpoint depends."""
TWICE = ("partial_rotary_factor", "rope_theta")
"""Fields of `rope_parameters` that a config.json may also have beside it; readers differ in which they take."""


def config_of(checkpoint: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a checkpoint as a run has it; tables are merged, anything else is replaced.

    Raises:
        SpecError: The file cannot be read, or a field cannot have another value than the checkpoint's.
    """
    config = _read_object(checkpoint / "config.json")
    free = [name for name in FREE_FIELDS if name in config]
    for name, value in overrides.items():
        if name not in FREE_FIELDS and config.get(name) != value:
            found = (
                f"the checkpoint has {config[name]!r}, on which its tensors depend"
                if name in config
                else f"{checkpoint / 'config.json'} has no such field"
            )
            raise SpecError(f"model.overrides.{name}: {found}; what can be another is {', '.join(free)}")
    return _in_both_places(config, overrides)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise SpecError(f"{path} is not there, which every Hugging Face checkpoint has") from None
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not a JSON object, as a Hugging Face checkpoint has there: {error}") from None
    if not isinstance(found, dict):
        raise SpecError(f"{path}: not a JSON object, as a Hugging Face checkpoint has there")
    return found


def _in_both_places(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merged; a field that the config has twice has its new value twice."""
    merged = _merged(config, overrides)
    rope, inside = (table.get("rope_parameters") for table in (merged, overrides))
    for name in TWICE:
        given = [table[name] for table in (overrides, inside) if isinstance(table, Mapping) and name in table]
        if not given or not isinstance(rope, Mapping) or name not in rope:
            continue
        if name in overrides and name not in config:
            raise SpecError(f"model.overrides.{name}: the checkpoint has rope_parameters.{name}; override that")
        if given[0] != given[-1]:
            raise SpecError(f"model.overrides: {name} and rope_parameters.{name} differ; give one of them")
        if name in config:
            merged[name] = given[0]
            rope = merged["rope_parameters"] = {**rope, name: given[0]}
    return merged


def _merged(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return {**table, **{name: _replaced(table.get(name), value) for name, value in over.items()}}


def _replaced(old: Any, new: Any) -> Any:
    return _merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
