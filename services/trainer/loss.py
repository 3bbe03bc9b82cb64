"""The loss: pure functions over response tokens.

Shapes: R response tokens, V vocabulary. Everything is float32 whatever the model computes in.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """`[R, V]` logits of the sampling distribution."""
    return logits.float() / temperature


def token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """`[R]` log-probability of each target under `[R, V]` scaled logits."""
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)


def entropy(logits: Tensor) -> Tensor:
    """`[R]` entropy in nats of the distributions of `[R, V]` scaled logits."""
    log_probs = logits.log_softmax(1)
    return -(log_probs.exp() * log_probs).sum(1)


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of PPO (arXiv 1707.06347) with an asymmetric clip (arXiv 2503.14476).

    Args:
        log_probs, old_log_probs, advantages: `[R]`; gradients flow through the first.
        eps_low, eps_high: The probability ratio counts within `[1 - eps_low, 1 + eps_high]`.

    Returns:
        `[R]` losses, and `[R]` 1.0 where the clip took effect.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    return torch.maximum(plain, clipped), (clipped > plain).float()
