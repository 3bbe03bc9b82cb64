"""Which linear layers of which model become fp8, by Hugging Face names: for engines and for converted checkpoints.

What a table does not name stays as it is: routers, norms, embeddings, heads, biases, and of a layer for multi-token
prediction, which is one more layer, eh_proj, enorm, hnorm, shared_head and embed_tokens. A module is named as in the
checkpoint, without `.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

Shapes = Mapping[str, tuple[int, int]]
"""[output, input] of matrices, by module."""

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LATENT_ATTENTION = (
    "self_attn.q_proj",
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
)
DENSE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERTS = ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj")
SHARED_EXPERTS = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj")

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "llama": ATTENTION + DENSE,
    "qwen2": ATTENTION + DENSE,
    "qwen3": ATTENTION + DENSE,
    "qwen3_moe": ATTENTION + DENSE + EXPERTS,
    "deepseek_v3": LATENT_ATTENTION + DENSE + EXPERTS + SHARED_EXPERTS,
    "glm4_moe": ATTENTION + DENSE + EXPERTS + SHARED_EXPERTS,
}
"""By `model_type`: linear layers within a layer of the model; * is a number."""

MERGED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
)
"""Linear layers that vLLM merges into one, in this order. They must be quantised all or none."""
LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(.+)")
EXPERT = re.compile(r"mlp\.experts\.\d+\.(\w+)")
HEAD = "lm_head"
"""A linear layer even where it is the embedding and no tensor of its own."""
EMBEDDING = "embed_tokens"
"""A matrix of no linear layer."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer of a model layer."""

    layer: int
    kind: str
    """Its name in the table."""
    group: tuple[str, ...]
    """Kinds that vLLM makes one layer of with this one, in order; the experts of a layer are one."""


def fp8_modules(
    shapes: Shapes, model_type: Any, block: tuple[int, int] | None, excluded: Collection[str] = ()
) -> frozenset[str]:
    """What the family's table names, less what is excluded and what vLLM could not load.

    vLLM merges layers, and wants a merged one to be quantised as a whole: what it cannot take of one is left out whole.

    Args:
        shapes: Of all matrices.
        model_type: As config.json has it.
        block: Rows and columns that share a scale; None where rows or matrices do.
        excluded: Modules that must stay as they are.

    Raises:
        ValueError: The family is not known.
    """
    linears = _linears(shapes, model_type)
    unfit = {
        (linear.layer, linear.group)
        for name, linear in linears.items()
        if name in excluded or (block and not _fits(linear, shapes[name], block))
    }
    return frozenset(name for name, one in linears.items() if (one.layer, one.group) not in unfit)


def linear_modules(modules: Collection[str], model_type: Any) -> frozenset[str]:
    """What the family's table names of some modules. Raises ValueError if the family is not known."""
    return frozenset(_linears(modules, model_type))


def plain_modules(modules: Collection[str], quantised: Collection[str]) -> list[str]:
    """The linear layers that a config must name because they are not quantised, sorted.

    Args:
        modules: All that have a matrix.
        quantised: What `fp8_modules` chose of them.
    """
    plain = {one for one in modules if one not in quantised and one.rpartition(".")[2] != EMBEDDING}
    return sorted({HEAD} | plain)


def _linears(modules: Collection[str], model_type: Any) -> dict[str, _Linear]:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type is {model_type!r}; known: {', '.join(FAMILIES)}")
    return {name: linear for name in modules if (linear := _find_linear(name, FAMILIES[model_type]))}


def _find_linear(module: str, family: tuple[str, ...]) -> _Linear | None:
    if not (found := LAYER.fullmatch(module)):
        return None
    kind = EXPERT.sub(r"mlp.experts.*.\1", found[2])
    if kind not in family:
        return None
    return _Linear(int(found[1]), kind, next((group for group in (EXPERTS, *MERGED) if kind in group), (kind,)))


def _fits(linear: _Linear, shape: tuple[int, int], block: tuple[int, int]) -> bool:
    """Whether vLLM takes a matrix of this shape in blocks (0.24 to 0.32: `validate_fp8_block_shape`).

    It quantises activations in groups as long as a block, so columns must come out even; and a block must not reach
    from one part of a merged layer into the next, so only the last part may have a ragged one.
    """
    is_last = linear.kind == linear.group[-1]
    return shape[1] % block[1] == 0 and (is_last or shape[0] % block[0] == 0)
