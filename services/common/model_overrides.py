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


def config_of(checkpoint: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a checkpoint as a run has it; tables are merged, anything else is replaced.

    Raises:
        SpecError: The file cannot be read, or a field cannot have another value than the checkpoint's.
    """
    config = _read_object(checkpoint / "config.json")
    for name, value in overrides.items():
        if name not in FREE_FIELDS and config.get(name) != value:
            found = f"the checkpoint says {config[name]!r}" if name in config else "the checkpoint has no such field"
            free = ", ".join(FREE_FIELDS)
            raise SpecError(f"model.overrides.{name}: {found}, not {value!r}; what can be another is {free}")
    return _merged(config, overrides)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path}: not a JSON object, as a Hugging Face checkpoint has there: {error}") from None
    if not isinstance(found, dict):
        raise SpecError(f"{path}: not a JSON object, as a Hugging Face checkpoint has there")
    return found


def _merged(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return {**table, **{name: _replaced(table.get(name), value) for name, value in over.items()}}


def _replaced(old: Any, new: Any) -> Any:
    return _merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
