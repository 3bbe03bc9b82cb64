"""The loss: pure functions over response tokens.

Shapes: R response tokens, V vocabulary. Everything is float32 whatever the model computes in, but for what is said to
have the dtype of the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """`[R, V]` logits of the sampling distribution."""
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def of_targets(scaled: Tensor, targets: Tensor) -> Tensor:
    """`[R]` scaled logit of each target, which counts from the first of the V; 0 where it is none of them."""
    inside = (targets >= 0) & (targets < scaled.shape[1])
    return scaled.gather(1, targets.where(inside, 0)[:, None])[:, 0].where(inside, 0.0)


def entropy(scaled: Tensor, normalizers: Tensor) -> Tensor:
    """`[R]` entropy in nats of the distributions of `[R, V]` scaled logits with log-sum-exp `normalizers`.

    If V is a part of the vocabulary and the normalizers are those of all of it: what this part adds.
    """
    log_probs = scaled - normalizers[:, None]
    return -(log_probs.exp() * log_probs).sum(1)


def logit_gradients(
    logits: Tensor, targets: Tensor, normalizers: Tensor, gradients: Tensor, temperature: float
) -> Tensor:
    """`[R, V]`, dtype of the logits: gradient of `(token_log_probs * gradients).sum()` to the unscaled logits."""
    slopes = (scaled_logits(logits, temperature) - normalizers[:, None]).exp_()  # of the log-sum-exp
    slopes -= (torch.arange(logits.shape[1], device=logits.device) == targets[:, None]).float()
    slopes *= (-gradients / temperature)[:, None]
    return slopes.to(logits.dtype)


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
