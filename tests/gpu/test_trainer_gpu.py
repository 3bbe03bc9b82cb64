"""The trainer on CUDA against Hugging Face models, torch's AdamW and itself in float32. Needs CUDA."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

from services.trainer.batch import Batch, Sample
from services.trainer.checkpoint import RunState, load, save
from services.trainer.hf_mapping import hf_tensors, rules_of, to_hf
from services.trainer.layout import by_expert
from services.trainer.megatron import DEVICE
from services.trainer.packing import make_pack
from services.trainer.report import Report
from services.trainer.step import Learner
from tests.gpu.trainer import make_learner
from tests.tiny_models import save_model
from tests.trainer_cases import make_batch, make_samples, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.usefixtures("world"),
]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen3")
    return path, save_model(path, seed=5).to(DEVICE)


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
