"""Which weights of a checkpoint become fp8, and which linear layers the new config must name because they do not."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.fp8_layers import fp8_modules, plain_modules
from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.weights import FP8, Contents
from services.weight_sync.layout import Scaling

QUANTISABLE = (FP8, "F32", "BF16", "F16")
WEIGHT = ".weight"
"""Ends the name of a module's matrix."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What happens to the weights."""

    quantised: frozenset[str]
    """Names of tensors."""
    plain_modules: tuple[str, ...]
    """Linear layers that stay unquantised, by name without `.weight`, sorted."""


def choose_targets(contents: Contents, scaling: Scaling) -> Targets:
    """What the family's table names, less what the source's config excludes and what vLLM could not load.

    Raises:
        CheckpointError: The family is not known.
    """
    matrices = {
        name.removesuffix(WEIGHT): weight.entry
        for name, weight in contents.weights.items()
        if name.endswith(WEIGHT) and len(weight.entry.shape) == 2
    }
    shapes = {
        name: (entry.shape[0], entry.shape[1])
        for name, entry in matrices.items()
        if entry.dtype in QUANTISABLE and all(entry.shape)
    }
    excluded = {name for name in shapes if contents.format is not None and contents.format.leaves_plain(name)}
    block = (scaling.rows, scaling.columns) if scaling.rows and scaling.columns else None
    try:
        quantised = fp8_modules(shapes, contents.checkpoint.model_config.get("model_type"), block, excluded)
    except ValueError as error:
        raise CheckpointError(f"{contents.checkpoint.config_file}: {error}") from None
    return Targets(frozenset(name + WEIGHT for name in quantised), tuple(plain_modules(matrices, quantised)))
