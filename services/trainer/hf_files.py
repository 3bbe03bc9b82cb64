"""The safetensors files of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.trainer.model_config import ModelError

EMBEDDING = "model.embed_tokens.weight"
"""Every family has it by this name."""


def find_tensors(checkpoint: Path) -> dict[str, Path]:
    """The safetensors file of each tensor. Raises ModelError if there is none, or an index that cannot be read."""
    index, single = checkpoint / "model.safetensors.index.json", checkpoint / "model.safetensors"
    if index.is_file():
        try:
            return {name: checkpoint / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index}: weight_map is missing or damaged: {error!r}") from None
    if not single.is_file():
        raise ModelError(f"{checkpoint}: neither {single.name} nor {index.name} is there")
    with open_weights(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """A safetensors file. Raises ModelError, naming it, if it is damaged or lacks what is asked for."""
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: {error}") from None


def read_tensor(file: Path, name: str) -> Tensor:
    """One tensor of a file. Raises ModelError."""
    with open_weights(file) as tensors:
        return tensors.get_tensor(name)
