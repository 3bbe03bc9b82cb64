"""Which parameters an engine wants, in HF names: a pure function of its checkpoint and of its loaded model.

The checkpoint says names and shapes. The loaded model says which of them are matrices of linear layers; it has fewer
and larger ones (qkv_proj for q_proj, k_proj and v_proj), and its packed_modules_mapping says how they were merged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.weight_sync.checkpoints.folder import INDEX
from services.weight_sync.checkpoints.header import read_shard
from services.weight_sync.records import ManifestParameter

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a manifest needs to know of the model in the engine; module names are vLLM's."""

    linear_modules: Collection[str]
    """Linear layers whose matrix may be quantised."""
    expert_modules: Collection[str]
    """Containers of routed experts, whose matrices may be quantised too."""
    packed_modules: Mapping[str, list[str]]
    """HF names of what a merged module was made of, by the last part of its name."""
    parameter_dtypes: Mapping[str, str]
    dtype: str
    """Of a parameter that `parameter_dtypes` does not name."""
    tied: bool
    """True if the head is the embedding."""
    layer_count: int
    """Layers from this number on (multi-token prediction) are not loaded."""


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a safetensors checkpoint, from its headers alone.

    Raises:
        FileNotFoundError: There are none.
        CheckpointError: A header is truncated or inconsistent.
    """
    index = directory / INDEX
    if index.is_file():
        files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there are no safetensors in {directory}")
    return {entry.name: entry.shape for file in files for entry in read_shard(file).entries}


def make_manifest(shapes: Mapping[str, tuple[int, ...]], model: LoadedModel) -> list[ManifestParameter]:
    """The manifest, sorted by name; what vLLM skips when it loads is left out."""
    quantisable = _matrices(model)
    return [
        ManifestParameter(
            name,
            shape,
            _dtype(name, model),
            len(shape) == 2 and (name in quantisable or _is_expert(name, model)),
        )
        for name, shape in sorted(shapes.items())
        if _loaded(name, model)
    ]


def _loaded(name: str, model: LoadedModel) -> bool:
    layer = LAYER.search(name)
    beyond = layer is not None and int(layer[1]) >= model.layer_count
    return not (beyond or name.endswith("rotary_emb.inv_freq") or (model.tied and name.startswith("lm_head.")))


def _matrices(model: LoadedModel) -> set[str]:
    return {f"{name}.weight" for module in model.linear_modules for name in _unpacked(module, model)}


def _unpacked(module: str, model: LoadedModel) -> list[str]:
    prefix, dot, last = module.rpartition(".")
    return [f"{prefix}{dot}{part}" for part in model.packed_modules.get(last, [last])]


def _is_expert(name: str, model: LoadedModel) -> bool:
    prefix, number, rest = name.partition(".experts.")
    return bool(number) and rest.endswith(".weight") and f"{prefix}.experts" in model.expert_modules


def _dtype(name: str, model: LoadedModel) -> str:
    """That of the engine's parameter of the same name, or of the merged one that it went into."""
    found = model.parameter_dtypes.get(name)
    if found is None:
        module, dot, last = name.rpartition(".")
        prefix, _, part = module.rpartition(".")
        merged = [f"{prefix}.{whole}{dot}{last}" for whole, parts in model.packed_modules.items() if part in parts]
        found = next((model.parameter_dtypes[one] for one in merged if one in model.parameter_dtypes), None)
    return found or model.dtype
