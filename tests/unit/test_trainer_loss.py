"""The loss functions against the definitions, written out for one token at a time. Nothing is faked."""

from __future__ import annotations

import math

import pytest
import torch

from services.trainer import loss


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    norm = top + math.log(sum(math.exp(x - top) for x in row))
    return [x - norm for x in row]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_and_entropy(temperature: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(9, 13, generator=draw)
    targets = torch.randint(0, 13, (9,), generator=draw)
    scaled = loss.scaled_logits(logits, temperature)
    found, spread = loss.token_log_probs(scaled, targets), loss.entropy(scaled)
    for row, target, log_prob, entropy in zip(logits.tolist(), targets.tolist(), found, spread, strict=True):
        expected = log_softmax([x / temperature for x in row])
        assert float(log_prob) == pytest.approx(expected[target], abs=1e-4)
        assert float(entropy) == pytest.approx(-sum(math.exp(x) * x for x in expected), abs=1e-4)


def test_bfloat16_logits_are_scaled_in_float32() -> None:
    assert loss.scaled_logits(torch.ones(2, 3, dtype=torch.bfloat16), 3.0).dtype == torch.float32


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0])
def test_the_clip_is_asymmetric(ratio: float, advantage: float) -> None:
    now = torch.tensor([math.log(ratio)], requires_grad=True)
    losses, clipped = loss.policy_loss(now, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)
    bounded = min(max(ratio, 0.8), 1.28)
    assert losses.item() == pytest.approx(max(-ratio * advantage, -bounded * advantage), rel=1e-5)
    losses.sum().backward()
    assert now.grad is not None
    active = (ratio > 1.28 and advantage > 0) or (ratio < 0.8 and advantage < 0)
    assert clipped.item() == float(active)
    assert now.grad.item() == pytest.approx(0.0 if active else -ratio * advantage, rel=1e-5)
