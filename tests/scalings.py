"""What the tests of quantisation on CPU and on CUDA share."""

from __future__ import annotations

import torch

from services.weight_sync.layout import BLOCK_128, CHANNEL, TENSOR, Scaling

SCALINGS = [
    BLOCK_128,
    CHANNEL,
    TENSOR,
    Scaling(64, 32),
    Scaling(128, 128, ue8m0=True),
    Scaling(1, 0, ue8m0=True),
    Scaling(0, 0, ue8m0=True),
]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, zeros with their signs too."""
    return one.equal(other) and one.signbit().equal(other.signbit())
