"""Log-probs, entropy, loss and their gradients against the definitions. Nothing is faked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from services.trainer import log_probs, loss
from services.trainer.log_probs import TILE_ROWS, chunk_rows, token_log_probs, token_log_probs_and_entropy

TOKENS, HIDDEN, VOCABULARY = 23, 16, 13
CHUNKS = [1, 5, 23, 100]


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    norm = top + math.log(sum(math.exp(x - top) for x in row))
    return [x - norm for x in row]


def make_inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and targets; logits spread over about +-20."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(tokens, HIDDEN, generator=draw), 2 * torch.randn(VOCABULARY, HIDDEN, generator=draw)
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=draw)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


@pytest.fixture(params=CHUNKS, ids=lambda rows: f"{rows}-rows")
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(log_probs, "chunk_rows", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_and_entropy(chunk: int, temperature: float) -> None:
    hidden, weight, targets = make_inputs()
    found, spread = token_log_probs_and_entropy(hidden, weight, targets, temperature)
    assert token_log_probs(hidden, weight, targets, temperature).equal(found)
    logits = (hidden @ weight.T).tolist()
    for row, target, log_prob, entropy in zip(logits, targets.tolist(), found, spread, strict=True):
        expected = log_softmax([x / temperature for x in row])
        assert float(log_prob) == pytest.approx(expected[target], abs=1e-4)
        assert float(entropy) == pytest.approx(-sum(math.exp(x) * x for x in expected), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_plain_form(chunk: int, dtype: torch.dtype) -> None:
    hidden, weight, targets = make_inputs(dtype=dtype)
    outer = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    (token_log_probs(hidden, weight, targets, 0.7) * outer).sum().backward()
    h, w = (x.detach().float().requires_grad_() for x in (hidden, weight))
    plain = torch.log_softmax(h @ w.T / 0.7, 1).gather(1, targets[:, None])[:, 0]
    (plain * outer).sum().backward()
    for ours, expected in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert ours is not None and expected is not None and ours.dtype == dtype
        bound = 1e-4 if dtype == torch.float32 else 0.03 * float(expected.abs().max())
        assert (ours.float() - expected).abs().max() <= bound


def test_the_gradient_of_the_weight_adds_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token in a chunk: 4,096 contributions of one sign, which bfloat16 would lose from 256 on."""
    monkeypatch.setattr(log_probs, "chunk_rows", lambda *_: 1)
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_log_probs(hidden, weight, torch.zeros(4096, dtype=torch.long), 1.0).sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [2048, -2048]


def test_no_tokens() -> None:
    hidden, weight, targets = make_inputs(0)
    found = token_log_probs(hidden, weight, targets, 1.0)
    found.sum().backward()
    assert found.shape == (0,)
    assert hidden.grad is not None and hidden.grad.shape == (0, HIDDEN)
    assert weight.grad is not None and not weight.grad.any()
    assert [len(one) for one in token_log_probs_and_entropy(hidden, weight, targets, 1.0)] == [0, 0]


def test_chunks_fit_their_budget_or_are_one_tile() -> None:
    for device, budget in log_probs.CHUNK_BYTES.items():
        rows = chunk_rows(4096, 4, device)
        assert rows % TILE_ROWS == 0
        assert rows * 4096 * 4 <= budget < (rows + TILE_ROWS) * 4096 * 4
        assert chunk_rows(1 << 40, 4, device) == TILE_ROWS


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
