"""Attention, experts and log-probs of the trainer on CUDA against plain torch. Nothing is faked. Needs CUDA."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer import attention, log_probs
from services.trainer.attention import CoreAttention, make_segments
from services.trainer.context import ContextRank
from services.trainer.log_probs import token_log_probs, token_log_probs_and_entropy
from services.trainer.megatron import DEVICE
from tests.expert_cases import COUNTS, make_experts, one_by_one
from tests.gpu.trainer import BF16_BOUND, assert_close, gradients_of, make_learner, randn
from tests.tiny_models import save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.usefixtures("world"),
]


@pytest.mark.parametrize("lengths", [(3, 700, 1, 65, 128, 257), (1,), (1, 1, 1), (1500,)], ids=str)
@pytest.mark.parametrize("key_heads", [8, 4, 1])
def test_flash_attention_is_attention_by_segment(lengths: tuple[int, ...], key_heads: int) -> None:
    total = sum(lengths)
    inputs = [randn(total, n, 64, seed=n, dtype=torch.bfloat16).requires_grad_() for n in (8, key_heads, key_heads)]
    core = CoreAttention.__new__(CoreAttention)
    torch.nn.Module.__init__(core)
    core.softmax_scale = None
    segments = make_segments(lengths, DEVICE)
    found = core(*inputs, packed_seq_params=segments)
    exact = [one.detach().float().requires_grad_() for one in inputs]
    expected = core(*exact, packed_seq_params=segments)
    assert_close(found, expected, BF16_BOUND, "output")
    for name, ours, theirs in zip("qkv", gradients_of([found], inputs), gradients_of([expected], exact), strict=True):
        assert_close(ours, theirs, BF16_BOUND, name)


@pytest.mark.parametrize(
    ("tokens", "dtype", "groups", "queries", "size"),
    [
        (300, torch.float32, 2, 2, 32),
        (300, torch.bfloat16, 2, 2, 32),
        (1, torch.bfloat16, 2, 2, 32),
        (200, torch.bfloat16, 3, 3, 64),
    ],
)
def test_compiled_heads_are_the_plain_ones(
    tokens: int, dtype: torch.dtype, groups: int, queries: int, size: int
) -> None:
    """The sizes of the tiny models first, whose compiled forms the tests below use again, then a second model's."""
    mixed = randn(tokens, 1, groups * (queries + 2) * size, dtype=dtype).requires_grad_()
    weights = [torch.nn.Parameter(randn(size, seed=seed, dtype=dtype)) for seed in (1, 2)]
    angles = randn(tokens, 1, 1, size, seed=3)
    rest = (angles.cos().to(dtype), angles.sin().to(dtype), *weights, groups, size, 1e-6)
    plain: Any = attention.split_heads
    found, expected = plain(mixed, *rest), plain.__wrapped__(mixed, *rest)
    inputs = [mixed, *weights]
    bound = 1e-4 if dtype == torch.float32 else BF16_BOUND
    pairs = zip([*found, *gradients_of(found, inputs)], [*expected, *gradients_of(expected, inputs)], strict=True)
    for index, (ours, theirs) in enumerate(pairs):
        assert_close(ours, theirs, bound, f"tensor {index}")


def poison(*shapes: tuple[int, ...]) -> None:
    """Fill memory that the next tensors of these shapes get, so that what a kernel leaves out shows."""
    del [torch.full(shape, math.nan, dtype=torch.bfloat16, device=DEVICE) for shape in shapes][:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hidden", "columns"), [(128, 48), (1024, 384), (264, 200)], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_experts_are_experts_one_by_one(
    counts: tuple[int, ...], hidden: int, columns: int, dtype: torch.dtype
) -> None:
    """Output and all gradients; those of an expert without tokens are zeros."""
    total = sum(counts)
    experts = make_experts(len(counts), hidden, columns, dtype)
    rows = randn(total, hidden, seed=3, dtype=dtype).requires_grad_()
    scores = randn(total, seed=4).sigmoid().requires_grad_()
    inputs = [rows, scores, experts.linear_fc1, experts.linear_fc2]
    poison((total, 2 * columns), (total, hidden))
    out, bias = experts(rows, torch.tensor(counts, device=DEVICE), scores)
    assert bias is None and out.dtype == dtype and out.shape == (total, hidden)
    poison(experts.linear_fc1.shape, experts.linear_fc2.shape)
    found = gradients_of([out], inputs)
    idle = [at for at, count in enumerate(counts) if not count]
    assert not any(one[idle].count_nonzero() for one in found[2:])
    if not total:
        return
    exact = [one.detach().float().requires_grad_() for one in inputs]
    expected = one_by_one(*exact, counts=counts)
    bound = 1e-4 if dtype == torch.float32 else BF16_BOUND
    assert_close(out, expected, bound, "output")
    pairs = zip(("rows", "scores", "fc1", "fc2"), found, gradients_of([expected], exact), strict=True)
    for name, ours, theirs in pairs:
        assert_close(ours, theirs, bound, name)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_layer_of_experts_neither_waits_for_the_device_nor_differs(family: str, tmp_path: Path) -> None:
    """From router to combination and back, in bfloat16; the same input gives the same bits."""
    save_model(tmp_path, family, seed=5)
    learner: Any = make_learner(tmp_path, "bfloat16")
    layer = learner.chunks[0].decoder.layers[-1].mlp
    inputs = [randn(300, 1, 128, dtype=torch.bfloat16).requires_grad_(), *layer.parameters()]
    found = []
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first one compiles
        try:
            out, _ = layer(inputs[0])
            found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for index, (one, other) in enumerate(zip(*found[1:], strict=True)):
        assert torch.equal(one, other), f"tensor {index}"


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(1000, torch.float32), (1000, torch.bfloat16), (1, torch.bfloat16), (0, torch.bfloat16)],
)
def test_log_probs_in_chunks_are_the_plain_ones(tokens: int, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(log_probs, "chunk_rows", lambda *_: 384)
    hidden = randn(tokens, 64, dtype=dtype).requires_grad_()
    weight = (randn(5000, 64, seed=1, dtype=dtype) / 4).requires_grad_()
    targets = torch.randint(0, 5000, (tokens,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found = token_log_probs(hidden, weight, targets, 0.7)
    observed, entropy = token_log_probs_and_entropy(hidden, weight, targets, 0.7)
    scores = torch.log_softmax((hidden @ weight.T).float() / 0.7, 1)
    expected = scores.gather(1, targets[:, None])[:, 0]
    assert found.shape == observed.shape == entropy.shape == expected.shape
    if tokens:
        bound, ulp = (1e-4, 1e-4) if dtype == torch.float32 else (BF16_BOUND, 0.06)  # of logits up to 8, over 0.7
        assert (observed - found).abs().max() <= 1e-4
        assert (found - expected).abs().max() <= ulp
        assert (entropy + (scores.exp() * scores).sum(1)).abs().max() <= ulp
        pairs = zip(gradients_of([found], [hidden, weight]), gradients_of([expected], [hidden, weight]), strict=True)
        for name, (ours, theirs) in zip(("hidden", "weight"), pairs, strict=True):
            assert_close(ours, theirs, bound, name)


def test_logits_of_all_tokens_never_exist(monkeypatch: Any) -> None:
    """4,096 tokens of Qwen3's vocabulary: 1.2 GB of logits in bfloat16, 2.5 GB in float32."""
    monkeypatch.setattr(log_probs, "CHUNK_BYTES", {"cuda": 1 << 26})
    hidden, weight = (randn(n, 64, dtype=torch.bfloat16).requires_grad_() for n in (4096, 151_936))
    targets = torch.zeros(4096, dtype=torch.long, device=DEVICE)
    token_log_probs(hidden, weight, targets, 1.0).sum().backward()
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_log_probs_and_entropy(hidden, weight, targets, 1.0)
    token_log_probs(hidden, weight, targets, 1.0).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 400e6, f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("lengths", [(16, 700, 4, 128), (4,), (2048, 2048)], ids=str)
def test_flash_attention_of_a_context_parallel_rank(lengths: tuple[int, ...], rank: int) -> None:
    """Its chunks attend to their segments up to their own ends: rows of what one rank computes."""
    total, context = sum(lengths), ContextRank(rank, 2)
    query, key, value = (randn(total, n, 64, seed=n, dtype=torch.bfloat16) for n in (8, 4, 4))
    core = CoreAttention.__new__(CoreAttention)
    torch.nn.Module.__init__(core)
    core.softmax_scale = None
    whole = core._attend_flash(query, key, value, make_segments(lengths, DEVICE))
    segments = make_segments(lengths, DEVICE, context)
    assert segments.key_rows is not None
    gathered = torch.cat([ContextRank(one, 2).places(lengths) for one in (0, 1)]).to(DEVICE)
    keys, values = (one[gathered][segments.key_rows] for one in (key, value))
    held = context.places(lengths).to(DEVICE)
    assert_close(core._attend_flash(query[held], keys, values, segments), whole[held], BF16_BOUND)
