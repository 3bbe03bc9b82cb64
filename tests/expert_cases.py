"""Experts with random weights, and what they must compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.trainer.experts import GroupedExperts
from services.trainer.megatron import DEVICE

COUNTS: dict[str, tuple[int, ...]] = {
    "even": (64,) * 16,
    "uneven": (0, 700, 1, 0, 0, 65, 3, 300, 0),
    "few": (0, 0, 5),
    "one row": (1,),
    "none": (0,) * 4,
    "many experts": (37, 0) * 128,
}
"""Rows of each expert."""


def make_experts(number: int, hidden: int, columns: int, dtype: torch.dtype) -> GroupedExperts:
    """So many of one rank; outputs are about as large as inputs."""
    experts = GroupedExperts.__new__(GroupedExperts)  # Megatron's groups are not needed
    torch.nn.Module.__init__(experts)
    draw = torch.Generator().manual_seed(number)
    for name, rows, size in (("linear_fc1", 2 * columns, hidden), ("linear_fc2", hidden, columns)):
        stack = torch.randn(number, rows, size, generator=draw) / size**0.5
        setattr(experts, name, torch.nn.Parameter(stack.to(DEVICE, dtype)))
    return experts


def one_by_one(rows: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, counts: Sequence[int]) -> Tensor:
    """The output of experts, `[R, H]`, by the formula: `[R, H]`, `[R]`, `[E, 2F, H]`, `[E, H, F]`."""
    parts = zip(rows.split(list(counts)), scores.split(list(counts)), gate_up, down, strict=True)
    return torch.cat([_one(*part) for part in parts])


def _one(rows: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ half.T for half in gate_up.chunk(2))
    return (gate * gate.sigmoid() * up * scores[:, None]) @ down.T
