"""Which linear layers of which model become fp8, by Hugging Face names.

What a table does not name stays as it is: routers, norms, embeddings, heads, biases, and of a layer for multi-token
prediction, which is one more layer, eh_proj, enorm, hnorm, shared_head and embed_tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
EXPERT = re.compile(r"mlp\.experts\.\d+\.(\w+)")


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of a model layer."""

    layer: int
    kind: str
    """Its name in the table."""
    group: tuple[str, ...]
    """Kinds that vLLM makes one layer of with this one, in order; the experts of a layer are one."""


def find_linear(tensor: str, model_type: str) -> Linear | None:
    """The linear layer whose matrix a tensor is, if the family's table has it."""
    if not (found := LAYER.fullmatch(tensor)):
        return None
    kind = EXPERT.sub(r"mlp.experts.*.\1", found[2])
    if kind not in FAMILIES[model_type]:
        return None
    groups = (EXPERTS, *MERGED)
    return Linear(int(found[1]), kind, next((group for group in groups if kind in group), (kind,)))
