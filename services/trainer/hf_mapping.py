"""Weights between Hugging Face and Megatron: one table, read in both directions, one parameter at a time.

Every change is a split, a concatenation or a permutation, so a round trip is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from services.trainer.hf_files import EMBEDDING, find_tensors, read_tensor
from services.trainer.hf_mtp import check_copies, copies_of, is_mtp
from services.trainer.layout import Cut, Owner, Owners, Weight, by_expert, cut_of, gather, global_name
from services.trainer.model import PolicyModel
from services.trainer.model_config import Experts, ModelConfig, ModelError


class Layout(Enum):
    """How one Megatron tensor is made of Hugging Face tensors."""

    PLAIN = "the same tensor"
    QKV = "for each query group its queries, then its key, then its value"
    GATE_UP = "gate over up"


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors that it holds; `{n}` is the layer, `{e}` an expert."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = Layout.PLAIN

    def at(self, key: str, number: int) -> Rule:
        """The rule of one layer, `{n}`, or expert, `{e}`."""
        names = tuple(name.replace(key, str(number)) for name in self.hf)
        return Rule(self.megatron.replace(key, str(number)), names, self.layout)


_LAYER = "decoder.layers.{n}."
_HF_LAYER = "model.layers.{n}."


def _plain(megatron: str, hf: str) -> Rule:
    """A tensor of a layer that is the same on both sides."""
    return Rule(_LAYER + megatron, (_HF_LAYER + hf,))


def _qkv(kind: str) -> Rule:
    """Queries, keys and values of a layer: `weight` or `bias`."""
    hf = tuple(f"{_HF_LAYER}self_attn.{x}_proj.{kind}" for x in "qkv")
    return Rule(f"{_LAYER}self_attention.linear_qkv.{kind}", hf, Layout.QKV)


def _feed_forward(megatron: str, hf: str) -> tuple[Rule, ...]:
    """The two matrices of a gated feed-forward, by the names of the module on both sides."""
    gate_up = tuple(f"{_HF_LAYER}{hf}.{x}_proj.weight" for x in ("gate", "up"))
    return (
        Rule(f"{_LAYER}{megatron}.linear_fc1.weight", gate_up, Layout.GATE_UP),
        _plain(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight"),
    )


_TOP = (
    Rule("embedding.word_embeddings.weight", (EMBEDDING,)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
)
_OUTPUT = "output_layer.weight"
_NORMS = (
    _plain("input_layernorm.weight", "input_layernorm.weight"),
    _plain("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)
_OUT = _plain("self_attention.linear_proj.weight", "self_attn.o_proj.weight")
_GROUPED_ATTENTION = (_qkv("weight"), _OUT)
_QKV_BIAS = (_qkv("bias"),)
_QK_NORM = tuple(_plain(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight") for x in "qk")
_LATENT_ATTENTION = (
    _plain("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    _plain("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    _plain("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    _plain("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    _plain("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    _plain("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    _OUT,
)
_DENSE = _feed_forward("mlp", "mlp")
_ROUTER = (_plain("mlp.router.weight", "mlp.gate.weight"),)
_ROUTER_BIAS = (_plain("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),)
_EXPERT = _feed_forward("mlp.experts.local_experts.{e}", "mlp.experts.{e}")
_SHARED_EXPERT = _feed_forward("mlp.shared_experts", "mlp.shared_experts")
_MTP_LAYER = "mtp.layers.0."
_MTP_NAMES = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
_MTP = tuple(Rule(f"{_MTP_LAYER}{ours}.weight", (f"{_HF_LAYER}{hf}.weight",)) for ours, hf in _MTP_NAMES.items())
"""`eh_proj` is for the embedding of the token ahead before the hidden state, on both sides."""

IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""Old Llama checkpoints store the rotary frequencies, which the config defines anyway."""


def rules_of(model: ModelConfig) -> dict[str, Rule]:
    """The rules of all weights of a model, by global Megatron name."""
    head = EMBEDDING if model.tied_embeddings else "lm_head.weight"
    rules = [*_TOP, Rule(_OUTPUT, (head,))]
    for layer in range(model.layers):
        rules += _layer_rules(model, layer)
    if model.mtp_built:
        rules += _mtp_rules(model)
    return {rule.megatron: rule for rule in rules}


def _layer_rules(model: ModelConfig, layer: int) -> list[Rule]:
    sparse = model.experts if layer >= model.dense_layers else None
    kinds = (*_NORMS, *_attention_rules(model), *(_expert_rules(sparse) if sparse else _DENSE))
    return [rule.at("{n}", layer) for rule in kinds]


def _mtp_rules(model: ModelConfig) -> list[Rule]:
    """Of the layer for multi-token prediction, which has a whole layer inside."""
    inside = (f"decoder.layers.{model.layers}.", f"{_MTP_LAYER}mtp_model_layer.")
    own = [rule.at("{n}", model.layers) for rule in _MTP]
    return own + [replace(rule, megatron=rule.megatron.replace(*inside)) for rule in _layer_rules(model, model.layers)]


def _attention_rules(model: ModelConfig) -> tuple[Rule, ...]:
    if model.latent:
        return _LATENT_ATTENTION
    return _GROUPED_ATTENTION + (_QKV_BIAS if model.qkv_bias else ()) + (_QK_NORM if model.qk_norm else ())


def _expert_rules(experts: Experts) -> tuple[Rule, ...]:
    each = tuple(rule.at("{e}", expert) for expert in range(experts.count) for rule in _EXPERT)
    bias = _ROUTER_BIAS if experts.sigmoid else ()
    return _ROUTER + bias + each + (_SHARED_EXPERT if experts.shared_ffn_hidden else ())


def weights_of(chunks: Sequence[PolicyModel]) -> Iterator[Weight]:
    """All that a checkpoint holds, detached: parameters, each expert's for itself, and the routers' biases."""
    for chunk in chunks:
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))
        for name, source in chain(chunk.named_parameters(), biases):
            for one, data in by_expert(name, source.detach()):
                yield Weight(global_name(one, chunk.config, chunk.vp_stage), data, source)


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


def hf_tensors(chunks: Sequence[PolicyModel], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Weights by Hugging Face name, whole and detached: those that this rank owns, which no other rank yields.

    A view of the parameter where that is possible. All ranks must go through it together. A head that is the embedding,
    of which a last stage has a copy, comes from the first stage.
    """
    rules, owners = rules_of(model), Owners()
    for weight in weights_of(chunks):
        if weight.name == _OUTPUT and model.tied_embeddings:
            continue
        rule, owner = rules[weight.name], owners.assign(weight.name, weight.data.nbytes)
        whole = _whole(rule, weight.data, cut_of(weight), owner) if owner else None
        if whole is not None:
            yield from zip(rule.hf, to_hf(rule, whole, model), strict=True)


def _whole(rule: Rule, part: Tensor, cut: Cut | None, owner: Owner) -> Tensor | None:
    """The whole weight on its owner, None elsewhere."""
    if cut is None:
        return part if owner.is_me else None
    parts = gather(part, cut, owner)
    return unshard(rule, parts, cut.dim) if parts else None


@torch.no_grad()
def load_hf(chunks: Sequence[PolicyModel], model: ModelConfig, checkpoint: Path) -> None:
    """Fill this rank's part of a model from the safetensors of a Hugging Face checkpoint, a parameter at a time.

    Raises:
        ModelError: A tensor is missing, unknown, or of another shape; the message names file and tensor.
    """
    files = find_tensors(checkpoint)
    rules = rules_of(model)
    check_names(set(files), model, checkpoint)
    for weight in weights_of(chunks):
        rule, cut = rules[weight.name], cut_of(weight)
        parts = [read_tensor(files[one], one) for one in rule.hf]
        shape = list(weight.data.shape)
        if cut is not None:
            shape[cut.dim] *= cut.size
        for name, part, like in zip(rule.hf, parts, to_hf(rule, torch.empty(shape, device="meta"), model), strict=True):
            _check_tensor(f"{files[name]}: {name}", part, like)
        check_copies(model, files, rule.hf[0], parts[0])
        full = to_megatron(rule, parts, model)
        weight.data.copy_(full if cut is None else shard(rule, full, cut.dim, cut.rank, cut.size))


def _check_tensor(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ModelError(f"{name} is {list(tensor.shape)}, but config.json says {list(like.shape)}")
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise ModelError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not plain bf16, fp16 or fp32")


def check_names(found: set[str], model: ModelConfig, checkpoint: Path) -> None:
    """Raise ModelError unless a checkpoint holds exactly the tensors of the model."""
    wanted = {name for rule in rules_of(model).values() for name in rule.hf}
    if missing := sorted(wanted - found):
        raise ModelError(f"{checkpoint}: {len(missing)} tensors are missing, the first is {missing[0]}")
    spare = {name for name in found - wanted if not name.endswith(IGNORED_SUFFIX)}
    spare -= set(copies_of(model, found)) if model.mtp_built else {name for name in spare if is_mtp(name, model)}
    if model.tied_embeddings:
        spare.discard("lm_head.weight")
    if spare:
        raise ModelError(f"{checkpoint}: {len(spare)} tensors are unknown to {model.family}, as {min(spare)}")
