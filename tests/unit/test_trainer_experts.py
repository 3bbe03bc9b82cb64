"""Experts as one grouped product, and tokens on their way to them and back, against the formula. Nothing is faked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.common.spec import ParallelSpec
from services.trainer.dispatch import Order
from services.trainer.layout import by_expert, check_layout
from services.trainer.megatron import DEVICE
from services.trainer.model_config import ModelError, read_config
from tests.expert_cases import COUNTS, make_experts, one_by_one
from tests.model_configs import RECIPES


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_experts_are_experts_one_by_one(counts: tuple[int, ...]) -> None:
    """Output and all gradients, in float32; those of an expert without tokens are zeros."""
    experts = make_experts(len(counts), 32, 24, torch.float32)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 32, generator=draw).to(DEVICE).requires_grad_()
    scores = torch.rand(sum(counts), generator=draw).to(DEVICE).requires_grad_()
    inputs = [rows, scores, experts.linear_fc1, experts.linear_fc2]
    found, _ = experts(rows, torch.tensor(counts, device=DEVICE), scores)
    expected = one_by_one(*inputs, counts=counts)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(one.square().sum(), inputs) for one in (found, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_tokens_go_to_their_experts_and_back() -> None:
    """Token 0 to the first and third expert, token 1 to the second and third, token 2 to the first two."""
    rows = torch.tensor([0, 2, 1, 2, 0, 1])
    order = Order(rows, 3)
    tokens = torch.arange(6, dtype=torch.float64).view(3, 2).requires_grad_()
    spread = order.spread(tokens)
    assert torch.equal(spread, tokens[rows])
    weights = torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=torch.float64)[:, None]
    sums = torch.tensor([[6.0], [9.0], [6.0]], dtype=torch.float64)
    assert torch.equal(order.collect(spread * weights), tokens * sums)
    assert torch.autograd.gradcheck(order.spread, tokens)
    assert torch.autograd.gradcheck(order.collect, spread.detach().requires_grad_())


@pytest.mark.parametrize("shape", [(0, 2), (0,)])
def test_experts_that_no_token_goes_to_get_nothing_and_give_nothing(shape: tuple[int, ...]) -> None:
    """A rank whose experts nobody chose; rows and scores."""
    order, rows = Order(torch.empty(0, dtype=torch.long), 0), torch.empty(shape, requires_grad=True)
    back = order.collect(order.spread(rows))
    assert back.shape == shape
    assert torch.autograd.grad(back.sum(), rows)[0].shape == shape


def test_a_stack_is_taken_apart_by_name() -> None:
    stack = torch.arange(12).view(2, 3, 2)
    parts = dict(by_expert("decoder.layers.1.mlp.experts.linear_fc1", stack))
    names = [f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc1.weight" for expert in (0, 1)]
    assert list(parts) == names and all(torch.equal(parts[name], stack[i]) for i, name in enumerate(names))
    name = "decoder.layers.1.mlp.shared_experts.linear_fc1.weight"
    assert [*by_expert(name, stack)] == [(name, stack)]


@pytest.mark.parametrize(
    ("fields", "ranks", "why"),
    [
        ({"hidden_size": 7172}, 1, r"hidden_size = 7172: with experts it must be a multiple of 8"),
        ({"moe_intermediate_size": 1996}, 1, r"moe_intermediate_size = 1996 on parallel\.expert_tensor = 1"),
        ({"moe_intermediate_size": 2024}, 2, r"moe_intermediate_size = 2024 on parallel\.expert_tensor = 2"),
    ],
)
def test_sizes_that_a_grouped_product_does_not_take_are_refused(
    fields: dict[str, int], ranks: int, why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**RECIPES["DeepSeek-R1"], **fields}))
    with pytest.raises(ModelError, match=why):
        check_layout(read_config(tmp_path), ParallelSpec(tensor=ranks, expert_tensor=ranks))
