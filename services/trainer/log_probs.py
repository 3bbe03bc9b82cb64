"""From hidden states to log-probabilities, without the logits of all tokens ever being in memory.

Logits are made for a chunk of tokens at a time, in the forward pass and once more in the backward pass.

Shapes: R response tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.trainer import loss
from services.trainer.fusion import fused

CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}
"""Size of the logits of one chunk. On CUDA large enough for the matrix product to be at full speed; on the CPU, where
nothing is fused, several copies of it live at once."""
ROW_MULTIPLE = 128
"""Rows of a tile of the matrix product."""


def chunk_rows(vocabulary: int, element_bytes: int, device: str) -> int:
    """Tokens in one chunk, at least 1."""
    rows = CHUNK_BYTES[device] // (vocabulary * element_bytes)
    return max(1, rows // ROW_MULTIPLE * ROW_MULTIPLE or rows)


def token_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Differentiable log-probabilities of the sampling distribution.

    Args:
        hidden: `[R, H]`, of the dtype of `weight`.
        weight: `[V, H]` of the output layer. Its gradient adds up over chunks in float32.
        targets: `[R]` token ids.
        temperature: Divides the logits.

    Returns:
        `[R]` float32.
    """
    return _TokenLogProbs.apply(hidden, weight, targets, temperature)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def token_log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """As `token_log_probs`, without gradient, and the `[R]` entropies in nats."""
    chunks = zip(*_split(weight, hidden, targets), strict=True)
    log_probs, entropies = zip(*(_observe(h @ weight.T, t, temperature) for h, t in chunks), strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        chunks = zip(*_split(weight, hidden, targets), strict=True)
        log_probs, normalizers = zip(*(_score(h @ weight.T, t, temperature) for h, t in chunks), strict=True)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalizers))
        ctx.temperature = temperature
        return torch.cat(log_probs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        parts = _split(weight, hidden, targets, normalizers, *gradients, grad_hidden)
        for h, t, n, g, grad_h in zip(*parts, strict=True):
            _add_gradients(h, weight, t, n, g, ctx.temperature, grad_h, grad_weight)
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _split(weight: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each tensor in chunks along its first dimension."""
    rows = chunk_rows(weight.shape[0], weight.element_size(), weight.device.type)
    return [tensor.split(rows) for tensor in tensors]


@fused(rows=2)
def _score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    scaled = loss.scaled_logits(logits, temperature)
    normalizers = scaled.logsumexp(1)
    return loss.token_log_probs(scaled, targets, normalizers), normalizers


@fused(rows=2)
def _observe(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    scaled = loss.scaled_logits(logits, temperature)
    normalizers = scaled.logsumexp(1)
    return loss.token_log_probs(scaled, targets, normalizers), loss.entropy(scaled, normalizers)


_logit_gradients = fused(rows=4)(loss.logit_gradients)


def _add_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    gradients: Tensor,
    temperature: float,
    grad_hidden: Tensor,
    grad_weight: Tensor,
) -> None:
    """Of one chunk: written to `grad_hidden`, added to `grad_weight`."""
    slopes = _logit_gradients(hidden @ weight.T, targets, normalizers, gradients, temperature)
    torch.mm(slopes, weight, out=grad_hidden)
    grad_weight += slopes.T @ hidden
