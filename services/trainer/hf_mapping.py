"""Weights between Hugging Face and Megatron: one table, read in both directions, one parameter at a time.

Every change is a split, a concatenation or a permutation, so a round trip is exact to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from services.trainer.model import ModelConfig, ModelError, PolicyModel


class Layout(Enum):
    """How one Megatron tensor is made of Hugging Face tensors."""

    PLAIN = "the same tensor"
    QKV = "for each query group its queries, then its key, then its value"
    GATE_UP = "gate over up"


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it holds; `{n}` stands for the layer."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = Layout.PLAIN

    def at_layer(self, layer: int) -> Rule:
        """The rule of one layer."""
        names = tuple(name.replace("{n}", str(layer)) for name in self.hf)
        return Rule(self.megatron.replace("{n}", str(layer)), names, self.layout)


_ATTENTION = "decoder.layers.{n}.self_attention."
_MLP = "decoder.layers.{n}.mlp."
_HF_ATTENTION = "model.layers.{n}.self_attn."
_HF_MLP = "model.layers.{n}.mlp."

_TOP = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)
_OUTPUT = (Rule("output_layer.weight", ("lm_head.weight",)),)
_DENSE_LAYER = (
    Rule("decoder.layers.{n}.input_layernorm.weight", ("model.layers.{n}.input_layernorm.weight",)),
    Rule(
        _ATTENTION + "linear_qkv.weight",
        tuple(_HF_ATTENTION + f"{x}_proj.weight" for x in "qkv"),
        Layout.QKV,
    ),
    Rule(_ATTENTION + "linear_proj.weight", (_HF_ATTENTION + "o_proj.weight",)),
    Rule("decoder.layers.{n}.pre_mlp_layernorm.weight", ("model.layers.{n}.post_attention_layernorm.weight",)),
    Rule(
        _MLP + "linear_fc1.weight",
        (_HF_MLP + "gate_proj.weight", _HF_MLP + "up_proj.weight"),
        Layout.GATE_UP,
    ),
    Rule(_MLP + "linear_fc2.weight", (_HF_MLP + "down_proj.weight",)),
)
_QK_NORM = tuple(Rule(_ATTENTION + f"{x}_layernorm.weight", (_HF_ATTENTION + f"{x}_norm.weight",)) for x in "qk")

LAYER_RULES = {"llama": _DENSE_LAYER, "qwen3": _DENSE_LAYER + _QK_NORM}
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Old Llama checkpoints store the rotary frequencies, which the config defines anyway."""


def rules_of(model: ModelConfig) -> dict[str, Rule]:
    """The rules of all parameters of a model, by global Megatron name."""
    rules = [*_TOP, *(() if model.tied_embeddings else _OUTPUT)]
    rules += [rule.at_layer(n) for n in range(model.layers) for rule in LAYER_RULES[model.family]]
    return {rule.megatron: rule for rule in rules}


def to_megatron(rule: Rule, tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
    """The whole Megatron tensor of a rule from its whole Hugging Face tensors."""
    if rule.layout is Layout.QKV:
        groups = [tensor.unflatten(0, (model.key_value_heads, -1)) for tensor in tensors]
        return torch.cat(groups, 1).flatten(0, 1)
    return torch.cat(list(tensors))


def to_hf(rule: Rule, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    """The inverse of `to_megatron`; views where that is possible."""
    if rule.layout is Layout.QKV:
        queries = model.heads // model.key_value_heads * model.head_size
        sizes = [queries, model.head_size, model.head_size]
        return [part.flatten(0, 1) for part in tensor.unflatten(0, (model.key_value_heads, -1)).split(sizes, 1)]
    return list(tensor.chunk(len(rule.hf)))


def shard(rule: Rule, full: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """The part of a whole Megatron tensor that one of `size` tensor-parallel ranks holds, cut along `dim`."""
    halves = full.chunk(2) if rule.layout is Layout.GATE_UP else (full,)
    return torch.cat([half.chunk(size, dim)[rank] for half in halves])


def unshard(rule: Rule, parts: Sequence[Tensor], dim: int) -> Tensor:
    """The inverse of `shard`, from the parts of all ranks in order."""
    halves = [part.chunk(2) if rule.layout is Layout.GATE_UP else (part,) for part in parts]
    return torch.cat([torch.cat(one, dim) for one in zip(*halves, strict=True)])


def hf_tensors(module: PolicyModel, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its Hugging Face name, whole and detached; a view of the parameter where that is possible."""
    rules = rules_of(model)
    for name, parameter in module.named_parameters():
        rule = rules[name]
        yield from zip(rule.hf, to_hf(rule, parameter.detach(), model), strict=True)


@torch.no_grad()
def load_hf(module: PolicyModel, model: ModelConfig, checkpoint: Path) -> None:
    """Fill a model from the safetensors of a Hugging Face checkpoint.

    Raises:
        ModelError: A tensor is missing, unknown, or of another shape; the message names file and tensor.
    """
    files = find_tensors(checkpoint)
    rules = rules_of(model)
    check_names(set(files), model, checkpoint)
    for name, parameter in module.named_parameters():
        rule = rules[name]
        full = to_megatron(rule, [_read(files[one], one) for one in rule.hf], model)
        if full.shape != parameter.shape:
            raise ModelError(
                f"{files[rule.hf[0]]}: {', '.join(rule.hf)} make {tuple(full.shape)}, but config.json says "
                f"{tuple(parameter.shape)}"
            )
        parameter.copy_(full)


def check_names(found: set[str], model: ModelConfig, checkpoint: Path) -> None:
    """Raise ModelError unless a checkpoint holds exactly the tensors of the model."""
    wanted = {name for rule in rules_of(model).values() for name in rule.hf}
    if missing := sorted(wanted - found):
        raise ModelError(f"{checkpoint}: {len(missing)} tensors are missing, the first is {missing[0]}")
    spare = {name for name in found - wanted if not name.endswith(IGNORED_SUFFIX)}
    if model.tied_embeddings:
        spare.discard("lm_head.weight")
    if spare:
        raise ModelError(f"{checkpoint}: {len(spare)} tensors are unknown to {model.family}, as {min(spare)}")


def find_tensors(checkpoint: Path) -> dict[str, Path]:
    """The safetensors file of each tensor. Raises ModelError if there is none."""
    index, single = checkpoint / "model.safetensors.index.json", checkpoint / "model.safetensors"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
        return {name: checkpoint / file for name, file in files.items()}
    if not single.is_file():
        raise ModelError(f"{checkpoint}: neither {single.name} nor {index.name} is there")
    with safe_open(single, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)
