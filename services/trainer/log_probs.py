"""From hidden states to log-probabilities, without the logits of all tokens ever being in memory.

Logits are made for a chunk of tokens at a time, in the forward pass and once more in the backward pass.

Shapes: R response tokens, H hidden, V vocabulary, or a rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer import loss
from services.trainer.fusion import fused

CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 23}
"""Size of the logits of one chunk. On CUDA large enough for the matrix product to be at full speed; on the CPU, where
nothing is fused, small enough for the caches."""
TILE_ROWS = 128
"""Rows of a tile of the matrix product, which a chunk has at least."""


def chunk_rows(vocabulary: int, element_bytes: int, device: str) -> int:
    """Tokens in one chunk."""
    tiles = CHUNK_BYTES[device] // (TILE_ROWS * vocabulary * element_bytes)
    return max(1, tiles) * TILE_ROWS


@dataclass(frozen=True, slots=True)
class Part:
    """The part of the vocabulary that a rank's output layer has."""

    first: int = 0
    """Token id of its first row."""
    group: dist.ProcessGroup | None = None
    """Ranks that have the other parts; None if this is all."""


WHOLE = Part()


def token_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, part: Part = WHOLE) -> Tensor:
    """Differentiable log-probabilities of the sampling distribution.

    Args:
        hidden: `[R, H]`, of the dtype of `weight`. Its gradient is that of this part of the vocabulary.
        weight: `[V, H]` of the output layer. Its gradient adds up over chunks in float32.
        targets: `[R]` token ids.
        temperature: Divides the logits.
        part: Which tokens the V are.

    Returns:
        `[R]` float32.
    """
    local = targets - part.first
    return _TokenLogProbs.apply(hidden, weight, local, temperature, part.group)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def token_log_probs_and_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, part: Part = WHOLE
) -> tuple[Tensor, Tensor]:
    """As `token_log_probs`, without gradient, and the `[R]` entropies in nats."""
    log_probs, entropies = [], []
    for chunk, local in zip(*_split(weight, hidden, targets - part.first), strict=True):
        logits = chunk @ weight.T
        found, normalizers = _combine(*_score(logits, local, temperature), part.group)
        log_probs.append(found)
        entropies.append(_sum(_entropy(logits, normalizers, temperature), part.group))
    return torch.cat(log_probs), torch.cat(entropies)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        chunks = zip(*_split(weight, hidden, targets), strict=True)
        scores = [_combine(*_score(h @ weight.T, t, temperature), group) for h, t in chunks]
        log_probs, normalizers = zip(*scores, strict=True)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalizers))
        ctx.temperature = temperature
        return torch.cat(log_probs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        parts = _split(weight, hidden, targets, normalizers, *gradients, grad_hidden)
        for h, t, n, g, grad_h in zip(*parts, strict=True):
            _add_gradients(h, weight, t, n, g, ctx.temperature, grad_h, grad_weight)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _split(weight: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each tensor in chunks along its first dimension."""
    rows = chunk_rows(weight.shape[0], weight.element_size(), weight.device.type)
    return [tensor.split(rows) for tensor in tensors]


@fused(rows=2)
def _score(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`[R]` scaled logits of the targets, and `[R]` log-sum-exps, of a part of the vocabulary."""
    scaled = loss.scaled_logits(logits, temperature)
    return loss.of_targets(scaled, targets), scaled.logsumexp(1)


@fused(rows=2)
def _entropy(logits: Tensor, normalizers: Tensor, temperature: float) -> Tensor:
    return loss.entropy(loss.scaled_logits(logits, temperature), normalizers)


def _combine(of_targets: Tensor, normalizers: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """`[R]` log-probabilities, and `[R]` log-sum-exps of the whole vocabulary, from what each part has."""
    if group is not None:
        parts = [torch.empty_like(normalizers) for _ in range(group.size())]
        dist.all_gather(parts, normalizers, group=group)
        normalizers = torch.stack(parts).logsumexp(0)
    return _sum(of_targets, group) - normalizers, normalizers


def _sum(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None:
        dist.all_reduce(part, group=group)
    return part


_logit_gradients = fused(rows=4)(loss.logit_gradients)


def _add_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    gradients: Tensor,
    temperature: float,
    grad_hidden: Tensor,
    grad_weight: Tensor | None,
) -> None:
    """Of one chunk: written to `grad_hidden`, added to `grad_weight` if that is wanted."""
    slopes = _logit_gradients(hidden @ weight.T, targets, normalizers, gradients, temperature)
    torch.mm(slopes, weight, out=grad_hidden)
    if grad_weight is not None:
        grad_weight += slopes.T @ hidden
