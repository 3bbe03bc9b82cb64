"""Which weights of a checkpoint become fp8, and which linear layers the new config must name because they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.weight_sync.checkpoints.errors import CheckpointError
from services.weight_sync.checkpoints.families import FAMILIES, Linear, find_linear
from services.weight_sync.checkpoints.weights import FP8, Contents, Weight
from services.weight_sync.layout import Scaling

QUANTISABLE = (FP8, "F32", "BF16", "F16")
HEAD = "lm_head"
"""A linear layer even where it is the embedding and no tensor of its own."""
EMBEDDING = "embed_tokens"
"""A matrix of no linear layer."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What happens to the weights."""

    quantised: frozenset[str]
    """Names of tensors."""
    plain_modules: tuple[str, ...]
    """Linear layers that stay unquantised, by name without `.weight`, sorted."""


def choose_targets(contents: Contents, scaling: Scaling) -> Targets:
    """What the family's table names, less what the source's config excludes and what vLLM could not load.

    vLLM merges layers, and wants a merged one to be quantised as a whole: what it cannot take of one it leaves out.

    Raises:
        CheckpointError: The family is not known.
    """
    model_type = contents.checkpoint.model_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{contents.checkpoint.config_file}: model_type is {model_type!r}; known: {', '.join(FAMILIES)}"
        )
    linears = {
        name: linear
        for name, weight in contents.weights.items()
        if _is_matrix(weight) and (linear := find_linear(name, model_type))
    }
    unfit = {
        (linear.layer, linear.group)
        for name, linear in linears.items()
        if _excluded(name, contents) or not _fits(linear, contents.weights[name].entry.shape, scaling)
    }
    quantised = frozenset(name for name, one in linears.items() if (one.layer, one.group) not in unfit)
    return Targets(quantised, _plain_modules(contents.weights, quantised))


def _is_matrix(weight: Weight) -> bool:
    shape = weight.entry.shape
    return weight.entry.dtype in QUANTISABLE and len(shape) == 2 and all(shape)


def _excluded(name: str, contents: Contents) -> bool:
    return contents.format is not None and contents.format.leaves_plain(_module(name))


def _fits(linear: Linear, shape: tuple[int, ...], scaling: Scaling) -> bool:
    """Whether vLLM takes a matrix of this shape in blocks; a row or a matrix with one scale fits always.

    It quantises activations in groups as long as a block, so columns must come out even; and a block must not reach
    from one part of a merged layer into the next, so only the last part may have a ragged one.
    """
    if not (scaling.rows and scaling.columns):
        return True
    is_last = linear.kind == linear.group[-1]
    return shape[1] % scaling.columns == 0 and (is_last or shape[0] % scaling.rows == 0)


def _plain_modules(weights: Mapping[str, Weight], quantised: frozenset[str]) -> tuple[str, ...]:
    modules = {
        _module(name)
        for name, weight in weights.items()
        if name.endswith(".weight") and len(weight.entry.shape) == 2 and name not in quantised
    }
    return tuple(sorted({HEAD} | {one for one in modules if one.rpartition(".")[2] != EMBEDDING}))


def _module(name: str) -> str:
    return name.removesuffix(".weight")
