"""How a model lies over ranks: which part of a weight a rank holds, and under which name.

Megatron's groups, in its default order from neighbours outwards: tensor, context, expert, data, pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.spec import ParallelSpec
from services.trainer.context import ContextRank
from services.trainer.log_probs import WHOLE, Part
from services.trainer.megatron import TransformerConfig, get_transformer_layer_offset, parallel_state
from services.trainer.model_config import ModelConfig, ModelError

EXPERT_SIZE_MULTIPLE = 8
"""Of what a row of an expert's matrices has on a rank."""
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Weight:
    """What has a name of its own in a model: a parameter, one expert's matrix of a stack, or a router's bias."""

    name: str
    """Global, with the layer and expert numbers of the whole model."""
    data: Tensor
    """A view."""
    source: Tensor
    """Parameter or buffer that has it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a weight is cut over tensor-parallel ranks."""

    dim: int
    rank: int
    size: int
    group: dist.ProcessGroup


def check_layout(model: ModelConfig, parallel: ParallelSpec) -> None:
    """Raise ModelError, naming the field, if a model cannot be laid out so."""
    experts = model.experts
    cut = {
        "tensor": {
            "attention heads": model.heads,
            "key-value heads": model.key_value_heads,
            "rows of the vocabulary": model.vocabulary,
            "columns of the feed-forward": model.ffn_hidden,
        },
        "expert": {"experts": experts.count if experts else 0},
        "expert_tensor": {"columns of an expert": experts.ffn_hidden if experts else 0},
    }
    for field, counts in cut.items():
        size = getattr(parallel, field)
        if size > 1 and not experts and field != "tensor":
            raise ModelError(f"parallel.{field} = {size}: the model has no experts")
        for what, count in counts.items():
            if count % size:
                raise ModelError(f"parallel.{field} = {size} does not divide the {count} {what} of the model")
    if experts:
        _check_experts(model.hidden, experts.ffn_hidden, parallel.expert_tensor)
    _check_stages(model, parallel)


def _check_experts(hidden: int, columns: int, ranks: int) -> None:
    """A grouped matrix product wants rows of a multiple of 16 bytes: 8 numbers in bfloat16."""
    if hidden % EXPERT_SIZE_MULTIPLE:
        raise ModelError(f"hidden_size = {hidden}: with experts it must be a multiple of {EXPERT_SIZE_MULTIPLE}")
    if columns % (EXPERT_SIZE_MULTIPLE * ranks):
        raise ModelError(
            f"moe_intermediate_size = {columns} on parallel.expert_tensor = {ranks}: the columns of an expert on a "
            f"rank must be a multiple of {EXPERT_SIZE_MULTIPLE}"
        )


def _check_stages(model: ModelConfig, parallel: ParallelSpec) -> None:
    ends = [one for one in (parallel.first_stage_layers, parallel.last_stage_layers) if one]
    stages, layers = parallel.pipeline - len(ends), model.layers - sum(ends)
    if stages < 0 or layers < stages or (layers % stages if stages else layers):
        raise ModelError(
            f"parallel.pipeline = {parallel.pipeline}: the {model.layers} layers of the model do not make so many "
            "stages; set parallel.first_stage_layers or last_stage_layers so that the others are alike"
        )
    _check_virtual_stages([*ends, layers // stages] if stages else ends, parallel)


def _check_virtual_stages(stage_layers: list[int], parallel: ParallelSpec) -> None:
    virtual = parallel.virtual_stages
    if virtual > 1 and parallel.pipeline == 1:
        raise ModelError(f"parallel.virtual_stages = {virtual}: there is one stage; set parallel.pipeline")
    for count in stage_layers:
        if count % virtual:
            raise ModelError(f"parallel.virtual_stages = {virtual} does not divide a stage of {count} layers")


def global_name(name: str, config: TransformerConfig, virtual_stage: int | None) -> str:
    """The name of a weight of this rank with the layer and expert numbers of the whole model."""
    layer_offset = get_transformer_layer_offset(config, virtual_stage)
    name = _LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) + layer_offset}.", name)
    if config.num_moe_experts is None:
        return name
    local = config.num_moe_experts // config.expert_model_parallel_size
    expert_offset = parallel_state.get_expert_model_parallel_rank() * local
    return _EXPERT.sub(lambda found: f".local_experts.{int(found[1]) + expert_offset}.", name)


def by_expert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A parameter by its name, or a stack of experts' matrices taken apart, by names of each.

    Args:
        name: Of the parameter on this rank.
        tensor: Itself, or what has its shape, such as its gradient.
    """
    head, found, matrix = name.partition(".experts.")
    if not found:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        yield f"{head}.experts.local_experts.{expert}.{matrix}.weight", part


def cut_of(weight: Weight) -> Cut | None:
    """How a weight of this rank is cut; None if it is whole here."""
    if not getattr(weight.source, "tensor_model_parallel", False):
        return None
    if _EXPERT.search(weight.name):
        group: Any = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return None
    dim = getattr(weight.source, "partition_dim")  # noqa: B009  Megatron adds it
    return Cut(dim - weight.source.ndim + weight.data.ndim, group.rank(), group.size(), group)


@dataclass(frozen=True, slots=True)
class Owner:
    """The rank that gives a weight to others, of those that have it or a part of it."""

    place: int
    """Among the ranks that share the weights of its copy."""
    is_me: bool


def gather(part: Tensor, cut: Cut, owner: Owner) -> list[Tensor] | None:
    """The parts of all ranks that share a weight, in order, on the owner; all of them must call it."""
    parts = [torch.empty_like(part) for _ in range(cut.size)] if owner.is_me else None
    dist.gather(part.contiguous(), parts, group=cut.group, group_dst=owner.place)
    return parts


class Owners:
    """Gives every weight of a stage an owner, so that all ranks own as many bytes.

    All of them ask in the same order, and get the same answers without a word.
    """

    def __init__(self) -> None:
        copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._dense = _Shares(copies, parallel_state.get_tensor_model_parallel_group())
        expert_copies = parallel_state.get_expert_data_parallel_group()
        self._experts = _Shares(expert_copies, parallel_state.get_expert_tensor_parallel_group())

    def assign(self, name: str, size_bytes: int) -> Owner | None:
        """The owner of a weight that has so many bytes on a rank; None if that is in another copy of the model."""
        return (self._experts if _EXPERT.search(name) else self._dense).assign(size_bytes)


class _Shares:
    """Bytes that each rank owns: the ranks of the first copy, then those of the second, and so on."""

    def __init__(self, copies: Any, parts: Any) -> None:
        self._copy, self._part, self._parts = copies.rank(), parts.rank(), parts.size()
        self._bytes = [0] * (copies.size() * parts.size())

    def assign(self, size_bytes: int) -> Owner | None:
        least = min(range(len(self._bytes)), key=self._bytes.__getitem__)
        self._bytes[least] += size_bytes
        copy, part = divmod(least, self._parts)
        return Owner(part, part == self._part) if copy == self._copy else None


def context_rank() -> ContextRank:
    """Which part of every sample this rank has."""
    group: Any = parallel_state.get_context_parallel_group()
    return ContextRank(group.rank(), group.size())


def vocabulary_part(rows: int) -> Part:
    """Which part of the vocabulary the output layer of this rank has, by the number of its rows."""
    group: Any = parallel_state.get_tensor_model_parallel_group()
    return Part(rows * group.rank(), group) if group.size() > 1 else WHOLE
