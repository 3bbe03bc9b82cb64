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
        SpecError: A field cannot have another value than the checkpoint's.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    for name, value in overrides.items():
        if name not in FREE_FIELDS and config.get(name) != value:
            found = f"the checkpoint says {config[name]!r}" if name in config else "the checkpoint has no such field"
            free = ", ".join(FREE_FIELDS)
            raise SpecError(f"model.overrides.{name}: {found}, not {value!r}; what can be another is {free}")
    return _merged(config, overrides)


def _merged(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return {**table, **{name: _replaced(table.get(name), value) for name, value in over.items()}}


def _replaced(old: Any, new: Any) -> Any:
    return _merged(old, new) if isinstance(old, Mapping) and isinstance(new, Mapping) else new
