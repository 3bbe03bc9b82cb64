"""Layers for multi-token prediction in a Hugging Face checkpoint.

They are numbered on after the layers of the model. Beside what is its own, such a layer has copies of the embedding and
of the output layer, which belong to the model: a checkpoint where they differ is refused if the layer is to be trained,
and an export makes them anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from services.trainer.hf_files import EMBEDDING, find_tensors, read_tensor
from services.trainer.model_config import ModelConfig, ModelError


def is_mtp(name: str, model: ModelConfig) -> bool:
    """Whether a tensor belongs to a layer for multi-token prediction."""
    layers = range(model.layers, model.layers + model.mtp_layers)
    return name.startswith(tuple(f"model.layers.{layer}." for layer in layers))


def mtp_tensors(model: ModelConfig, checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights that a checkpoint has for multi-token prediction, by Hugging Face name."""
    for name, file in find_tensors(checkpoint).items():
        if is_mtp(name, model):
            yield name, read_tensor(file, name)


def with_mtp_of(model: ModelConfig, checkpoint: Path) -> ModelConfig:
    """The model with its layer for multi-token prediction, if a checkpoint has one."""
    there = model.mtp_layers == 1 and any(is_mtp(name, model) for name in find_tensors(checkpoint))
    return replace(model, mtp_built=there)


def copies_of(model: ModelConfig, names: Collection[str]) -> dict[str, str]:
    """The copies among the tensors of a checkpoint, each with what it is a copy of; empty if the layer is not built."""
    layer = f"model.layers.{model.layers}."
    copies = {
        f"{layer}embed_tokens.weight": EMBEDDING,
        f"{layer}shared_head.head.weight": EMBEDDING if model.tied_embeddings else "lm_head.weight",
    }
    return {copy: original for copy, original in copies.items() if model.mtp_built and copy in names}


def check_copies(model: ModelConfig, files: Mapping[str, Path], name: str, tensor: Tensor) -> None:
    """Raise ModelError if a checkpoint has a copy of a tensor that differs from it."""
    for copy, original in copies_of(model, files).items():
        if original == name and not torch.equal(read_tensor(files[copy], copy), tensor):
            raise ModelError(f"{files[copy]}: {copy} is not {name}: a layer for multi-token prediction must share it")


def with_copies(tensors: Mapping[str, Tensor], model: ModelConfig, names: Collection[str]) -> dict[str, Tensor]:
    """Tensors, and what a checkpoint with these names has copies of among them."""
    copies = copies_of(model, names).items()
    return {**tensors, **{copy: tensors[original].clone() for copy, original in copies if original in tensors}}
