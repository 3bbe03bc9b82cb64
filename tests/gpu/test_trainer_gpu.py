"""The trainer on CUDA against plain torch, Hugging Face models and itself in float32. Nothing is faked. Needs CUDA."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from services.trainer import attention, log_probs, megatron
from services.trainer.attention import CoreAttention, make_segments
from services.trainer.batch import Batch, Sample
from services.trainer.checkpoint import RunState, load, save
from services.trainer.context import ContextRank
from services.trainer.hf_mapping import hf_tensors, rules_of, to_hf
from services.trainer.layout import by_expert
from services.trainer.log_probs import token_log_probs, token_log_probs_and_entropy
from services.trainer.megatron import DEVICE
from services.trainer.model_config import read_config
from services.trainer.packing import make_pack
from services.trainer.report import Report
from services.trainer.step import Learner
from tests.expert_cases import COUNTS, make_experts, one_by_one
from tests.tiny_models import save_model
from tests.trainer_cases import make_batch, make_samples, make_spec, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BF16_BOUND = 0.03
"""Of the largest value: a few roundings to 8 bits of mantissa."""


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    torch._dynamo.config.recompile_limit = 64  # more dtypes and sizes meet here than in a trainer
    megatron.initialize(seed=1)
    yield
    megatron.destroy()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen3")
    return path, save_model(path, seed=5).to(DEVICE)


def make_learner(path: Path, dtype: str, **sections: Any) -> Learner:
    learner = Learner(make_spec(path, trainer={"dtype": dtype}, **sections), read_config(path))
    learner.load_initial_weights()
    return learner


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(found: Tensor, expected: Tensor, bound: float, name: str = "") -> None:
    """Largest difference, relative to the largest value expected, or to 0.1 if that is more."""
    gap = float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=0.1))
    assert gap <= bound, f"{name}: relative difference {gap:.2e}, allowed {bound:.0e}"


def gradients_of(outputs: Iterable[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Of a sum with fixed random weights of all outputs."""
    total = torch.stack([(one.float() * randn(*one.shape, seed=7)).sum() for one in outputs]).sum()
    return list(torch.autograd.grad(total, inputs))


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


def packed_log_probs(learner: Learner, samples: list[Sample]) -> list[Tensor]:
    batch = make_batch(samples, 0, [range(len(samples))])
    pack = make_pack(batch, batch.micro_batches[0], samples, DEVICE)
    found = learner._observe([pack], Report())
    return list(found[0].split([len(one.response) for one in samples]))


@torch.no_grad()
def hf_log_probs(hf: Any, sample: Sample) -> Tensor:
    """Of the response, from one forward of the whole sample."""
    scores = hf(torch.tensor([sample.prompt + sample.response], device=DEVICE)).logits[0].log_softmax(-1)
    response = torch.tensor(sample.response, device=DEVICE)
    return scores[len(sample.prompt) - 1 : -1].gather(1, response[:, None])[:, 0]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_log_probs_are_those_of_hugging_face(qwen3: tuple[Path, Any], dtype: str, bound: float) -> None:
    path, hf = qwen3
    samples = make_samples(7, seed=1, longest=90)
    for sample, ours in zip(samples, packed_log_probs(make_learner(path, dtype), samples), strict=True):
        assert (ours - hf_log_probs(hf, sample)).abs().max() <= bound


def gradients(learner: Learner, batch: Batch, samples: list[Sample]) -> dict[str, Tensor]:
    """Main gradients of one optimizer step, not taken, by Hugging Face name."""
    packs = [make_pack(batch, one, samples, DEVICE) for one in batch.micro_batches]
    learner.optimizer.zero_gradients()
    learner._run([(pack, pack.rollout_log_probs) for pack in packs], learner._train_step, forward_only=False)
    rules, found = rules_of(learner.model), {}
    for name, parameter in learner.chunks[0].named_parameters():
        grad = getattr(parameter, "main_grad").view(parameter.shape)  # noqa: B009  Megatron adds it
        for one, part in by_expert(name, grad.clone()):
            found |= dict(zip(rules[one].hf, to_hf(rules[one], part, learner.model), strict=True))
    return found


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """In float32 they are those of Hugging Face; in bfloat16, where a token may go to another expert, they train."""
    hf = save_model(tmp_path, family, seed=5).to(DEVICE)
    samples = make_samples(7, seed=1, longest=90)
    learner = make_learner(tmp_path, "float32")
    for sample, ours in zip(samples, packed_log_probs(learner, samples), strict=True):
        assert (ours - hf_log_probs(hf, sample)).abs().max() <= 1e-4
    batch = make_batch(samples, 0, [range(7)])
    half = make_learner(tmp_path, "bfloat16")
    found, expected = (train(one, batch, samples) for one in (half, learner))
    assert found["train/skipped_steps"] == expected["train/skipped_steps"] == 0
    assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=0.05)
    assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.2)


def test_gradients_in_bfloat16_point_where_those_in_float32_do(qwen3: tuple[Path, Any]) -> None:
    path, _ = qwen3
    samples = make_samples(8, seed=4, longest=90)
    batch = make_batch(samples, 0, [[0, 1, 2], [3, 4, 5, 6, 7]])
    half, exact = (gradients(make_learner(path, dtype), batch, samples) for dtype in ("bfloat16", "float32"))
    for name, expected in exact.items():
        likeness = F.cosine_similarity(half[name].flatten(), expected.flatten(), 0)
        assert likeness >= 0.98, f"{name}: cosine {float(likeness):.4f}"
        assert float(half[name].norm() / expected.norm()) == pytest.approx(1.0, abs=0.05), name


def test_a_step_in_bfloat16_is_that_in_float32(qwen3: tuple[Path, Any]) -> None:
    path, _ = qwen3
    samples = make_samples(8, seed=4, longest=90)
    batch = make_batch(samples, 0, [[0, 1, 2], [3, 4, 5, 6, 7]])
    settings = {"optimizer": {"lr": 1e-2, "clip_grad": 0.5}}
    half, exact = (make_learner(path, dtype, **settings) for dtype in ("bfloat16", "float32"))
    ours, theirs = train(half, batch, samples), train(exact, batch, samples)
    assert ours["train/skipped_steps"] == theirs["train/skipped_steps"] == 0
    assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=0.02)
    assert ours["train/entropy"] == pytest.approx(theirs["train/entropy"], abs=0.02)
    assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=0.05)
    for (name, low), (_, high) in zip(*(hf_tensors(one.chunks, one.model) for one in (half, exact)), strict=True):
        # The first step of Adam is the sign of the gradient: where that is lost in rounding, two rates apart.
        assert (low.float() - high).abs().max() <= 2.1e-2 + 2**-8 * float(high.abs().max()), name
        assert (low.float() - high).abs().mean() <= 2e-3 + 2**-9 * float(high.abs().mean()), name


def test_a_step_in_float32_is_that_of_torch_adamw(qwen3: tuple[Path, Any]) -> None:
    """The fused optimizer on CUDA, two steps, against the unfused one of torch on the same gradients."""
    path, _ = qwen3
    samples = make_samples(6, seed=8)
    batch = make_batch(samples, 0, [range(6)])
    settings = {"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.5, "clip_grad": 0.3}
    learner = make_learner(path, "float32", optimizer=settings)
    copies = {name: p.detach().clone().requires_grad_() for name, p in learner.chunks[0].named_parameters()}
    decayed = [[p for p in copies.values() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": decayed[0], "weight_decay": 0.5}, {"params": decayed[1], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-8, foreach=False, fused=False)
    for step in range(2):
        gradients(learner, batch, samples)
        for name, parameter in learner.chunks[0].named_parameters():
            copies[name].grad = getattr(parameter, "main_grad").view(parameter.shape).clone()  # noqa: B009
        norm = torch.nn.utils.clip_grad_norm_(copies.values(), 0.3)
        for group in adam.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 2
        adam.step()
        assert learner.optimizer.step(step).grad_norm == pytest.approx(float(norm), rel=1e-4)
        for name, parameter in learner.chunks[0].named_parameters():
            assert (parameter - copies[name]).abs().max() <= 1e-5, name


def test_training_improves_and_compiles_once(qwen3: tuple[Path, Any]) -> None:
    """In a thread of its own, as in the service; packs of many lengths."""
    path, _ = qwen3
    learner = make_learner(path, "bfloat16", optimizer={"lr": 1e-3})
    samples = make_samples(6, seed=12)
    batch = make_batch(samples, 0, [range(6)])

    def score() -> float:
        found = packed_log_probs(learner, samples)
        return sum(row.advantage * float(lp.mean()) for row, lp in zip(batch.rows, found, strict=True))

    with ThreadPoolExecutor(1) as thread:
        before = score()
        for _ in range(8):
            assert math.isfinite(thread.submit(train, learner, batch, samples).result()["train/loss"])
        assert score() > before + 0.1
        graphs = []
        for longest in (10, 30, 60, 100, 150):
            others = make_samples(5, seed=longest, longest=longest)
            thread.submit(learner.train, make_batch(others, 0, [[0, 1], [2, 3, 4]]), others).result()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert graphs[1:] == graphs[1:2] * 4, f"graphs compiled so far, after packs of other lengths: {graphs}"


def test_a_gradient_that_is_not_finite_is_skipped(qwen3: tuple[Path, Any]) -> None:
    path, _ = qwen3
    learner = make_learner(path, "bfloat16")
    samples = make_samples(4, seed=8)
    batch = make_batch(samples, 0, [[0, 1], [2, 3]])
    broken = replace(batch, rows=tuple(replace(row, advantage=math.nan) for row in batch.rows))
    before = {name: tensor.clone() for name, tensor in hf_tensors(learner.chunks, learner.model)}
    assert train(learner, broken, samples)["train/skipped_steps"] == 1
    for name, tensor in hf_tensors(learner.chunks, learner.model):
        assert torch.equal(tensor, before[name]), name
    assert train(learner, batch, samples)["train/skipped_steps"] == 0


def optimizer_state(learner: Learner) -> list[Tensor]:
    adam = learner.optimizer.megatron.optimizer
    parameters = [one for group in adam.param_groups for one in group["params"]]
    keys = ("step", "exp_avg", "exp_avg_sq")
    return [*parameters, *(adam.state[one][key] for one in parameters for key in keys)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_holds_everything(qwen3: tuple[Path, Any], tmp_path: Path, dtype: str) -> None:
    path, _ = qwen3
    samples = make_samples(6, seed=3)
    first = make_learner(path, dtype, optimizer={"lr": 1e-3})
    for number in range(2):
        train(first, make_batch(samples, number, [[0, 4], [2, 1], [3, 5]]), samples)
    state = RunState(2, "d" * 64, ("one", "two"))
    saved = save(tmp_path, first, state)
    second = make_learner(path, dtype, optimizer={"lr": 1e-3})
    assert load(saved, second, "d" * 64) == state
    for (name, ours), (_, theirs) in zip(*(hf_tensors(x.chunks, x.model) for x in (first, second)), strict=True):
        assert ours.device.type == theirs.device.type == DEVICE.type and torch.equal(ours, theirs), name
    for index, (ours, theirs) in enumerate(zip(optimizer_state(first), optimizer_state(second), strict=True)):
        assert ours.device == theirs.device and torch.equal(ours, theirs), f"optimizer tensor {index}"
    batch = make_batch(samples, 2, [[0, 4], [2, 1], [3, 5]])
    ours, theirs = train(first, batch, samples), train(second, batch, samples)
    assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-3)
    assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-2)


def test_a_token_outside_the_vocabulary_is_an_error(qwen3: tuple[Path, Any]) -> None:
    path, _ = qwen3
    samples = make_samples(2, seed=3)
    samples[1] = replace(samples[1], prompt=(*samples[1].prompt, 320))
    with pytest.raises(ValueError, match="row 1: token 320"):
        train(make_learner(path, "bfloat16"), make_batch(samples, 0, [[0, 1]]), samples)
