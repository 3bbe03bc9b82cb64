"""What the tests of the trainer on CUDA share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.megatron import DEVICE
from services.trainer.model_config import read_config
from services.trainer.step import Learner
from tests.trainer_cases import make_spec

BF16_BOUND = 0.03
"""Of the largest value: a few roundings to 8 bits of mantissa."""


def make_learner(path: Path, dtype: str, **sections: Any) -> Learner:
    learner = Learner(make_spec(path, trainer={"dtype": dtype}, **sections), read_config(path))
    learner.load_initial_weights()
    return learner


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(found: Tensor, expected: Tensor, bound: float, name: str = "") -> None:
    """Largest difference, relative to the largest value expected, or to 0.1 if that is more."""
    gap = float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=0.1))
    assert gap <= bound, f"{name}: relative difference {gap:.2e}, allowed {bound:.0e}"


def gradients_of(outputs: Iterable[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Of a sum with fixed random weights of all outputs."""
    total = torch.stack([(one.float() * randn(*one.shape, seed=7)).sum() for one in outputs]).sum()
    return list(torch.autograd.grad(total, inputs))
