"""The trainer's model, loss and gradients against Hugging Face models and plain torch. Nothing is faked.

The oracle of the loss is written here from its definition: one forward of the Hugging Face model for each sample.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.trainer import hf_mapping, megatron
from services.trainer.attention import CoreAttention, should_pad
from services.trainer.batch import Batch, Sample
from services.trainer.export import export_hf
from services.trainer.layout import by_expert
from services.trainer.megatron import DEVICE
from services.trainer.model_config import ModelError
from services.trainer.packing import make_pack
from services.trainer.report import Report
from services.trainer.run_model import run_model
from services.trainer.step import Learner
from tests.tiny_models import VOCABULARY, save_model, save_mtp_model
from tests.trainer_cases import make_batch, make_samples, make_spec, train

pytestmark = pytest.mark.stack

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}
MODELS = {
    "qwen3-tied": {"family": "qwen3", "tied": True},
    "qwen3-untied": {"family": "qwen3", "tied": False},
    "llama": {"family": "llama", "tied": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "llama-tied": {"family": "llama", "tied": True},
    "llama3-scaling": {"family": "llama", "tied": False, "rope_parameters": LLAMA3},
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen3_moe": {"family": "qwen3_moe", "tied": False},
    "deepseek_v3": {"family": "deepseek_v3", "tied": False},
    "deepseek_v3-yarn": {"family": "deepseek_v3", "tied": False, "rope_parameters": YARN},
    "glm4_moe": {"family": "glm4_moe", "tied": False},
}
EPS_LOW, EPS_HIGH = 0.2, 0.28


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    megatron.initialize(seed=1)
    yield
    megatron.destroy()


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return path, save_model(path, seed=3, **MODELS[request.param])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("qwen3")
    return path, save_model(path, seed=5)


def make_learner(path: Path, **sections: Any) -> Learner:
    spec = make_spec(path, **sections)
    learner = Learner(spec, run_model(spec))
    learner.load_initial_weights()
    return learner


def hf_log_probs(hf: Any, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the response tokens, from one forward of the whole sample."""
    tokens = torch.tensor([sample.prompt + sample.response])
    scores = torch.log_softmax(hf(tokens).logits[0].float() / temperature, -1)
    first = len(sample.prompt)
    return torch.stack([scores[first + i - 1, token] for i, token in enumerate(sample.response)])


def packed_log_probs(learner: Learner, samples: Sequence[Sample]) -> list[torch.Tensor]:
    batch = make_batch(samples, 0, [range(len(samples))])
    pack = make_pack(batch, batch.micro_batches[0], samples, DEVICE)
    log_probs = learner._observe([pack], Report())
    return list(log_probs[0].split([len(one.response) for one in samples]))


def test_logits_are_those_of_hugging_face(checkpoint: tuple[Path, Any]) -> None:
    path, hf = checkpoint
    learner = make_learner(path)
    tokens = torch.randint(0, VOCABULARY, (2, 96), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(96).expand(2, -1)
    with torch.no_grad():
        ours = learner.chunks[0](tokens, positions, None)
        theirs = hf(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("longest", [24, 200], ids=["padded", "by-segment"])
def test_packed_is_one_by_one(checkpoint: tuple[Path, Any], longest: int) -> None:
    path, hf = checkpoint
    learner = make_learner(path)
    samples = make_samples(7, seed=1)
    if longest > 24:
        samples = samples[:1] * 20 + make_samples(1, seed=2, longest=longest)
        samples[-1] = replace(samples[-1], prompt=samples[-1].prompt * 100)
        samples[-1] = replace(samples[-1], prompt=samples[-1].prompt[:400])
    lengths = tuple(len(one.prompt) + len(one.response) - 1 for one in samples)
    assert should_pad(lengths) == (longest == 24)
    packed = packed_log_probs(learner, samples)
    for sample, ours in zip(samples, packed, strict=True):
        with torch.no_grad():
            theirs = hf_log_probs(hf, sample)
        assert (ours - theirs).abs().max() <= 1e-5
        assert (ours - packed_log_probs(learner, [sample])[0]).abs().max() <= 1e-5


def test_overrides_make_the_model_that_an_export_describes(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "deepseek_v3", tied=False)
    overrides = {"rope_parameters": YARN, "num_experts_per_tok": 2, "topk_group": 1}
    learner = make_learner(tmp_path / "model", model={"overrides": overrides})
    export_hf(learner, tmp_path / "model", tmp_path / "hf", overrides)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokens = torch.randint(0, VOCABULARY, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = learner.chunks[0](tokens, torch.arange(96)[None], None)
        assert (ours - hf(tokens).logits).abs().max() <= 1e-5
        assert (ours - plain(tokens).logits).abs().max() > 0.1


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_for_multi_token_prediction_are_kept(family: str, tmp_path: Path) -> None:
    save_mtp_model(tmp_path / "a", family)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    export_hf(make_learner(tmp_path / "a"), tmp_path / "a", tmp_path / "b")
    exported = load_file(tmp_path / "b" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())


def test_round_trip_is_exact(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = checkpoint
    learner = make_learner(path)
    original = load_file(path / "model.safetensors")
    export_hf(learner, path, tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported[name], tensor), name
    names = {file.name for file in (tmp_path / "hf").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names


@pytest.mark.parametrize("made", ["transposed", "int8"])
@pytest.mark.parametrize("name", ["mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_a_tensor_of_another_shape_or_kind_is_refused(
    qwen3: tuple[Path, Any], tmp_path: Path, name: str, made: str
) -> None:
    """Also where those that Megatron holds as one are as many numbers together as they must be."""
    shutil.copytree(qwen3[0], tmp_path / "model")
    file, name = tmp_path / "model" / "model.safetensors", f"model.layers.1.{name}.weight"
    tensors = load_file(file)
    tensors[name] = tensors[name].T.contiguous() if made == "transposed" else tensors[name].to(torch.int8)
    save_file(tensors, file)
    words = r"is \[.*\], but config.json says" if made == "transposed" else "is int8, not plain"
    with pytest.raises(ModelError, match=rf"{file}: {name} {words}"):
        make_learner(tmp_path / "model")


def oracle(hf: Any, old: Sequence[torch.Tensor], batch: Batch, samples: Sequence[Sample]) -> torch.Tensor:
    """GRPO's clipped loss: a token mean over each rollout, then a mean over rollouts, token by token."""
    total = torch.zeros(())
    for sample, row, before in zip(samples, batch.rows, old, strict=True):
        for t, (now, then) in enumerate(zip(hf_log_probs(hf, sample), before, strict=True)):
            ratio = torch.exp(now - then)
            clipped = min(max(ratio, torch.tensor(1 - EPS_LOW)), torch.tensor(1 + EPS_HIGH))
            loss = torch.maximum(-ratio * row.advantage, -clipped * row.advantage)
            total = total + loss * sample.loss_mask[t] / max(1, sum(sample.loss_mask))
    return total / len(samples)


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Main gradients by Hugging Face name."""
    rules = hf_mapping.rules_of(learner.model)
    found = {}
    for name, parameter in learner.chunks[0].named_parameters():
        grad = getattr(parameter, "main_grad").view(parameter.shape)  # noqa: B009  Megatron adds it
        for one, part in by_expert(name, grad):
            found |= dict(zip(rules[one].hf, hf_mapping.to_hf(rules[one], part, learner.model), strict=True))
    return found


def hf_gradients(hf: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """By the names of a checkpoint, where every expert has matrices of its own; transformers holds them as one."""
    for name, parameter in hf.named_parameters():
        prefix, _, last = name.rpartition(".experts.")
        for expert, grad in enumerate(parameter.grad if prefix else ()):
            parts = (
                {"gate_proj": grad.chunk(2)[0], "up_proj": grad.chunk(2)[1]} if last == "gate_up_proj" else {last: grad}
            )
            yield from ((f"{prefix}.experts.{expert}.{part}.weight", one) for part, one in parts.items())
        if not prefix:
            yield name, parameter.grad


def loss_and_gradients(
    learner: Learner, batch: Batch, samples: Sequence[Sample], old: Sequence[torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """What the learner computes for one optimizer step, without taking it."""
    packs = [make_pack(batch, one, samples, DEVICE) for one in batch.micro_batches]
    before = [torch.cat([torch.empty(0), *(old[row] for row in one.rows)]) for one in batch.micro_batches]
    learner.optimizer.zero_gradients()
    sums = learner._run(list(zip(packs, before, strict=True)), learner._train_step, forward_only=False)
    return sum(float(one["loss"]) for one in sums), {k: g.clone() for k, g in gradients(learner).items()}


def shifted_log_probs(hf: Any, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Old log-probs some way off, so that ratios fall on both sides of both clips."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        return [hf_log_probs(hf, one) + 0.4 * torch.randn(len(one.response), generator=draw) for one in samples]


def test_loss_and_gradients_are_those_of_the_definition(checkpoint: tuple[Path, Any]) -> None:
    path, hf = checkpoint
    samples = make_samples(6, seed=4)
    batch = make_batch(samples, 0, [range(6)])
    old = shifted_log_probs(hf, samples)
    hf.zero_grad()
    expected = oracle(hf, old, batch, samples)
    expected.backward()
    loss, grads = loss_and_gradients(make_learner(path), batch, samples, old)
    assert math.isclose(loss, float(expected.detach()), abs_tol=1e-5)
    for name, grad in hf_gradients(hf):
        assert (grads[name] - grad).abs().max() <= 1e-5, name


def test_loss_and_gradients_do_not_depend_on_micro_batches(qwen3: tuple[Path, Any]) -> None:
    path, hf = qwen3
    samples = make_samples(6, seed=4)
    old = shifted_log_probs(hf, samples)
    learner = make_learner(path)
    whole, together = loss_and_gradients(learner, make_batch(samples, 0, [range(6)]), samples, old)
    for cut in ([[0, 1], [2, 3, 4, 5]], [[5], [3, 0], [], [1], [2, 4]]):
        loss, apart = loss_and_gradients(learner, make_batch(samples, 0, cut), samples, old)
        assert math.isclose(loss, whole, abs_tol=1e-6)
        for name, grad in together.items():
            assert (apart[name] - grad).abs().max() <= 1e-6, name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_computed_again_changes_no_bit(checkpoint: tuple[Path, Any], recompute: str) -> None:
    path, _ = checkpoint
    samples = make_samples(6, seed=4)
    batch, old = (
        make_batch(samples, 0, [[0, 1, 2], [3, 4, 5]]),
        [torch.tensor(one.rollout_log_probs) for one in samples],
    )
    kept = loss_and_gradients(make_learner(path), batch, samples, old)
    learner, calls = make_learner(path, parallel={"recompute": recompute}), []
    attentions = [one for one in learner.chunks[0].modules() if isinstance(one, CoreAttention)]
    for one in attentions:
        one.register_forward_hook(lambda *_: calls.append(1))
    loss, grads = loss_and_gradients(learner, batch, samples, old)
    assert len(calls) == 2 * 2 * len(attentions)
    assert loss == kept[0]
    for name, grad in grads.items():
        assert torch.equal(grad, kept[1][name]), name


def test_the_temperature_divides_the_logits(qwen3: tuple[Path, Any]) -> None:
    path, hf = qwen3
    samples = make_samples(3, seed=6)
    learner = make_learner(path, rollout={"temperature": 0.7})
    with torch.no_grad():
        for ours, sample in zip(packed_log_probs(learner, samples), samples, strict=True):
            assert (ours - hf_log_probs(hf, sample, 0.7)).abs().max() <= 1e-5


def test_a_step_is_that_of_torch_adamw(qwen3: tuple[Path, Any]) -> None:
    """Two optimizer steps of one rollout: warm-up, clipping, weight decay on matrices only."""
    path, _ = qwen3
    hf = save_model(path, seed=5)
    samples = make_samples(4, seed=8)
    batch = make_batch(samples, 0, [[0, 1], [2, 3]], steps=2)
    settings = {"lr": 1e-2, "warmup_steps": 2, "weight_decay": 0.5, "clip_grad": 0.3}
    learner = make_learner(path, optimizer=settings, algorithm={"num_steps_per_rollout": 2})
    metrics = train(learner, batch, samples)
    groups = [
        {"params": [p for p in hf.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in hf.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-8)
    with torch.no_grad():
        old = [hf_log_probs(hf, one) for one in samples]
    norms = []
    for step, rows in enumerate(([0, 1], [2, 3])):
        part = replace(batch, rows=tuple(batch.rows[row] for row in rows))
        adam.zero_grad()
        oracle(hf, [old[row] for row in rows], part, [samples[row] for row in rows]).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(hf.parameters(), 0.3)))
        for group in adam.param_groups:
            group["lr"] = 1e-2 * (step + 1) / 2
        adam.step()
    ours = dict(hf_mapping.hf_tensors(learner.chunks, learner.model))
    for name, parameter in hf.named_parameters():
        assert (ours[name] - parameter).abs().max() <= 2e-4, name
    assert math.isclose(metrics["train/grad_norm"], sum(norms) / 2, rel_tol=1e-4)
    assert metrics["train/lr"] == 1e-2
    assert metrics["train/skipped_steps"] == 0


def test_a_gradient_that_is_not_finite_is_skipped(qwen3: tuple[Path, Any]) -> None:
    path, _ = qwen3
    learner = make_learner(path, algorithm={"num_steps_per_rollout": 2}, optimizer={"lr": 1e-3})
    samples = make_samples(4, seed=8)
    batch = make_batch(samples, 0, [[0, 1], [2, 3]], steps=2)
    broken = replace(batch, rows=tuple(replace(row, advantage=math.nan) for row in batch.rows))
    before = {name: tensor.clone() for name, tensor in hf_mapping.hf_tensors(learner.chunks, learner.model)}
    metrics = train(learner, broken, samples)
    assert metrics["train/skipped_steps"] == 2
    for name, tensor in hf_mapping.hf_tensors(learner.chunks, learner.model):
        assert torch.equal(tensor, before[name]), name
    after = train(learner, batch, samples)
    assert after["train/skipped_steps"] == 0
    assert math.isfinite(after["train/loss"])
    assert after["train/grad_norm"] > 0


def test_a_token_outside_the_vocabulary_is_an_error(qwen3: tuple[Path, Any]) -> None:
    samples = make_samples(2, seed=3)
    samples[1] = replace(samples[1], prompt=(*samples[1].prompt, VOCABULARY))
    with pytest.raises(ValueError, match=f"row 1: token {VOCABULARY}"):
        train(make_learner(qwen3[0]), make_batch(samples, 0, [[0, 1]]), samples)


def test_observed_metrics(qwen3: tuple[Path, Any]) -> None:
    path, hf = qwen3
    samples = make_samples(5, seed=11)
    batch = make_batch(samples, 0, [[3, 1], [0, 2, 4]])
    metrics = train(make_learner(path), batch, samples)
    gaps, entropies = [], []
    with torch.no_grad():
        for sample in samples:
            first = len(sample.prompt)
            scores = torch.log_softmax(hf(torch.tensor([sample.prompt + sample.response])).logits[0], -1)
            spread = torch.distributions.Categorical(logits=scores[first - 1 : -1]).entropy()
            mask = torch.tensor(sample.loss_mask)
            gaps += [
                abs(float(scores[first + t - 1, token]) - sample.rollout_log_probs[t])
                for t, token in enumerate(sample.response)
                if sample.loss_mask[t]
            ]
            entropies.append(float((spread * mask).sum() / max(1, int(mask.sum()))))
    assert math.isclose(metrics["train/log_prob_gap_mean"], sum(gaps) / len(gaps), abs_tol=1e-4)
    assert math.isclose(metrics["train/log_prob_gap_max"], max(gaps), abs_tol=1e-4)
    assert math.isclose(metrics["train/entropy"], sum(entropies) / len(entropies), abs_tol=1e-4)
    assert metrics["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["train/pg_clipfrac"] == 0


def test_bfloat16_trains(qwen3: tuple[Path, Any], tmp_path: Path) -> None:
    path, hf = qwen3
    learner = make_learner(path, trainer={"dtype": "bfloat16"}, optimizer={"lr": 1e-3})
    assert {p.dtype for p in learner.chunks[0].parameters()} == {torch.bfloat16}
    samples = make_samples(4, seed=12)
    with torch.no_grad():
        for ours, sample in zip(packed_log_probs(learner, samples), samples, strict=True):
            assert (ours - hf_log_probs(hf, sample)).abs().max() <= 0.2
    batch = make_batch(samples, 0, [range(4)])
    scores = []
    for _ in range(8):
        log_probs = packed_log_probs(learner, samples)
        scores.append(sum(row.advantage * float(lp.mean()) for row, lp in zip(batch.rows, log_probs, strict=True)))
        assert math.isfinite(train(learner, batch, samples)["train/loss"])
    assert scores[-1] > scores[0] + 0.1
    export_hf(learner, path, tmp_path / "hf")
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert described == {**json.loads((path / "config.json").read_text()), "dtype": "bfloat16"}
