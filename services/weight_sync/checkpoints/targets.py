"""Which weights of a checkpoint become fp8, and which linear layers the new config must name because they do not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.common.fp8_layers import fp8_modules, linear_modules, plain_modules
from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.header import Entry
from services.weight_sync.checkpoints.weights import FP8, Contents
from services.weight_sync.layout import Scaling

QUANTISABLE = (FP8, "F32", "BF16", "F16")
FUSED_EXPERTS = re.compile(r"\.experts\.(?!\d)")
WEIGHT = ".weight"
"""Ends the name of a module's matrix."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What happens to the weights."""

    quantised: frozenset[str]
    """Names of tensors."""
    plain_modules: tuple[str, ...]
    """Linear layers that stay unquantised, by name without `.weight`, sorted."""
    left_out: tuple[str, ...]
    """Tensors that the family's table names and that stay unquantised all the same."""


def choose_targets(contents: Contents, scaling: Scaling) -> Targets:
    """What the family's table names, less what the source's config excludes and what vLLM could not load.

    Raises:
        CheckpointError: The family is not known, experts are not one matrix each, or nothing would become fp8.
    """
    _refuse_fused_experts(contents)
    matrices = {
        name.removesuffix(WEIGHT): weight.entry
        for name, weight in contents.weights.items()
        if name.endswith(WEIGHT) and len(weight.entry.shape) == 2
    }
    shapes = {name: (entry.shape[0], entry.shape[1]) for name, entry in matrices.items()}
    excluded = {
        name for name, entry in matrices.items() if not _is_quantisable(entry) or _is_left_plain(name, contents)
    }
    block = (scaling.rows, scaling.columns) if scaling.rows and scaling.columns else None
    model_type = contents.checkpoint.model_config.get("model_type")
    try:
        quantised = fp8_modules(shapes, model_type, block, excluded)
    except ValueError as error:
        raise CheckpointError(f"{contents.checkpoint.config_file}: {error}") from None
    left_out = sorted(name + WEIGHT for name in linear_modules(matrices, model_type) - quantised)
    if not quantised:
        why = (
            f"its linear layers are excluded, or blocks of {block[0]}x{block[1]} do not fit"
            if block and left_out
            else "it has no linear layers to quantise"
        )
        raise CheckpointError(f"{contents.checkpoint.directory}: nothing would become fp8, since {why}")
    return Targets(
        frozenset(name + WEIGHT for name in quantised), tuple(plain_modules(matrices, quantised)), tuple(left_out)
    )


def _refuse_fused_experts(contents: Contents) -> None:
    for name, weight in contents.weights.items():
        if FUSED_EXPERTS.search(name):
            raise CheckpointError(
                f"{weight.entry.file}: {name} {list(weight.entry.shape)} holds all experts of a layer; understood is "
                "one matrix for each, as experts.0.up_proj.weight"
            )


def _is_quantisable(entry: Entry) -> bool:
    return entry.dtype in QUANTISABLE and all(entry.shape)


def _is_left_plain(module: str, contents: Contents) -> bool:
    return contents.format is not None and contents.format.leaves_plain(module)
