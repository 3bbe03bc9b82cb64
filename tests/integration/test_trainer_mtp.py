"""The layer for multi-token prediction against a plain reference, and what its training touches. Nothing is faked.

Hugging Face's models leave the layer out. The reference is made here of their parts, from section 2.2 of arXiv
2412.19437; the embedding comes before the hidden state in `eh_proj`, as engines read such checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer import megatron
from services.trainer.batch import Sample
from services.trainer.checkpoint import CheckpointError, RunState, save
from services.trainer.export import export_hf
from services.trainer.hf_files import find_tensors, read_tensor
from services.trainer.hf_mapping import hf_tensors
from services.trainer.hf_mtp import is_mtp
from services.trainer.model_config import ModelError
from services.trainer.run_model import run_model
from services.trainer.step import Learner
from services.trainer.torch_dist import write_hf, write_torch_dist
from tests.tiny_models import VOCABULARY, save_model, save_mtp_model
from tests.trainer_cases import make_batch, make_samples, make_spec, train

pytestmark = pytest.mark.stack

FACTOR = 0.3
FAMILIES = ("deepseek_v3", "glm4_moe")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    megatron.initialize(seed=1)
    yield
    megatron.destroy()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    return path, save_mtp_model(path, request.param, seed=3)


def make_learner(path: Path, factor: float = FACTOR, load: Path = Path(), **optimizer: float) -> Learner:
    trainer, rates = {"mtp_loss_scaling_factor": factor}, {"lr": 1e-3, **optimizer}
    spec = make_spec(path, model={"load": load}, trainer=trainer, optimizer=rates)
    learner = Learner(spec, run_model(spec))
    learner.load_initial_weights()
    return learner


class Reference(torch.nn.Module):
    """The layer, of the parts of a Hugging Face model."""

    def __init__(self, path: Path, hf: Any) -> None:
        super().__init__()
        last = hf.model.layers[-1]
        self.hf, self.layer = hf, type(last)(hf.config, layer_idx=len(hf.model.layers))
        self.enorm, self.hnorm, self.norm = (type(hf.model.norm)(128, eps=hf.config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(256, 128, bias=False)
        prefix = "model.layers.3."
        found = {
            name.removeprefix(prefix): x for name, x in load_file(path / "model.safetensors").items() if prefix in name
        }
        own = {name: found.pop(name) for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
        own["norm.weight"] = found.pop("shared_head.norm.weight")
        self.head, self.embedding = found.pop("shared_head.head.weight"), found.pop("embed_tokens.weight")
        own |= {f"layer.{name}": x for name, x in pack_experts(found, self.layer).items()}
        missing, unknown = self.load_state_dict(own, strict=False)
        assert not unknown and all(name.startswith("hf.") for name in missing)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[L - 1, vocabulary]` logits, from `[L]` tokens: at place t of token t + 2."""
        model = self.hf.model
        hidden = model(tokens[None]).last_hidden_state[:, :-1]
        ahead = torch.nn.functional.embedding(tokens[None, 1:], self.embedding)
        mixed = self.eh_proj(torch.cat([self.enorm(ahead), self.hnorm(hidden)], -1))
        positions = torch.arange(mixed.shape[1])[None]
        angles = model.rotary_emb(mixed, positions)
        mask = torch.full((mixed.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        output = self.layer(mixed, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        output = output[0] if isinstance(output, tuple) else output
        return (self.norm(output) @ self.head.T)[0]


def pack_experts(tensors: dict[str, torch.Tensor], layer: Any) -> dict[str, torch.Tensor]:
    """As this version of Hugging Face's modules holds them: all experts of a layer in one tensor."""
    wanted = layer.state_dict()
    if "mlp.experts.gate_up_proj" not in wanted:
        return tensors
    count = wanted["mlp.experts.gate_up_proj"].shape[0]
    of = [[tensors.pop(f"mlp.experts.{e}.{x}_proj.weight") for x in ("gate", "up", "down")] for e in range(count)]
    packed = {"gate_up_proj": [torch.cat(one[:2]) for one in of], "down_proj": [one[2] for one in of]}
    return {**tensors, **{f"mlp.experts.{name}": torch.stack(several) for name, several in packed.items()}}


def reference_loss(reference: Reference, samples: list[Sample]) -> torch.Tensor:
    """Mean over samples of the mean over counted tokens."""
    losses = []
    for one in samples:
        tokens = torch.tensor(one.prompt + one.response)
        scores = torch.log_softmax(reference(tokens), -1)
        first = len(one.prompt)
        terms = [-scores[first + i - 2, token] * one.loss_mask[i] for i, token in enumerate(one.response)]
        losses.append(sum(terms) / max(1, sum(one.loss_mask)))
    return torch.stack(losses).mean()


def test_logits_are_those_of_the_reference(checkpoint: tuple[Path, Any]) -> None:
    path, hf = checkpoint
    chunk = make_learner(path).chunks[0]
    tokens = torch.randint(0, VOCABULARY, (48,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(48)[None]
    with torch.no_grad():
        hidden = hf.model(tokens[None]).last_hidden_state.transpose(0, 1)
        predicted = chunk.predict_ahead(hidden, tokens.roll(-1)[None], positions)
        ours = predicted[:-1, 0] @ load_file(path / "model.safetensors")["lm_head.weight"].T
        theirs = Reference(path, hf)(tokens)
    assert (ours - theirs).abs().max() <= 1e-5


def test_loss_is_that_of_the_reference_however_it_is_packed(checkpoint: tuple[Path, Any]) -> None:
    path, hf = checkpoint
    samples = make_samples(6, seed=4)
    with torch.no_grad():
        expected = float(reference_loss(Reference(path, hf), samples))
    found = []
    for micro_batches in ([range(6)], [[0, 3], [1], [2, 4, 5]]):
        metrics = train(make_learner(path), make_batch(samples, 0, micro_batches), samples)
        assert metrics["train/mtp_loss"] == pytest.approx(expected, rel=1e-5)
        found.append(metrics["train/mtp_grad_norm"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] > 0


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in hf_tensors(learner.chunks, learner.model)}


def test_without_advantages_nothing_else_moves(checkpoint: tuple[Path, Any]) -> None:
    learner = make_learner(checkpoint[0], weight_decay=0.0)
    samples, before = make_samples(4, seed=1), weights(learner)
    batch = make_batch(samples, 0, [range(4)])
    still = tuple(replace(row, advantage=0.0) for row in batch.rows)
    metrics = train(learner, replace(batch, rows=still), samples)
    assert metrics["train/grad_norm"] == 0.0
    moved = {name for name, tensor in weights(learner).items() if not torch.equal(tensor, before[name])}
    own = {name for name in before if is_mtp(name, learner.model)}
    assert moved <= own
    unmoved = {name for name in own - moved if not name.endswith("e_score_correction_bias")}
    assert all(".experts." in name for name in unmoved), "experts that no token went to"


def test_the_policy_learns_as_without_it(checkpoint: tuple[Path, Any]) -> None:
    samples = make_samples(4, seed=2)
    batch, learners = make_batch(samples, 0, [[0, 1], [2, 3]]), [make_learner(checkpoint[0], f) for f in (0.0, FACTOR)]
    metrics = [train(learner, batch, samples) for learner in learners]
    for name in ("train/loss", "train/grad_norm"):
        assert metrics[0][name] == metrics[1][name]
    plain, both = map(weights, learners)
    assert plain.keys() == {name for name in both if not is_mtp(name, learners[1].model)}
    assert all(torch.equal(both[name], tensor) for name, tensor in plain.items())


def test_exports_have_the_trained_layer(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = checkpoint
    learner, samples = make_learner(path), make_samples(4, seed=3)
    original = load_file(path / "model.safetensors")

    def export(name: str) -> dict[str, torch.Tensor]:
        export_hf(learner, path, tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    exported = export("before")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
    train(learner, make_batch(samples, 0, [range(4)]), samples)
    exported = export("after")
    assert exported.keys() == original.keys()
    assert not torch.equal(exported["model.layers.3.eh_proj.weight"], original["model.layers.3.eh_proj.weight"])
    for copy, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert torch.equal(exported[f"model.layers.3.{copy}.weight"], exported[f"{name}.weight"])
        assert not torch.equal(exported[f"{name}.weight"], original[f"{name}.weight"])


def test_torch_dist_has_the_layer(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = checkpoint
    write_torch_dist(path, tmp_path / "torch_dist", megatron.ONE_RANK)
    original = load_file(path / "model.safetensors")
    for factor in (0.0, FACTOR):
        learner = make_learner(path, factor, load=tmp_path / "torch_dist")
        assert all(torch.equal(original[name], tensor) for name, tensor in weights(learner).items())
    samples = make_samples(4, seed=3)
    train(learner, make_batch(samples, 0, [range(4)]), samples)
    saved = save(tmp_path, learner, RunState(1, "d" * 64, ("batch-0",)))
    write_hf(saved, path, tmp_path / "hf")
    found = {name: read_tensor(file, name) for name, file in find_tensors(tmp_path / "hf").items()}
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(learner).items())
    assert torch.equal(found["model.layers.3.shared_head.head.weight"], found["lm_head.weight"])
    frozen = make_learner(path, 0.0)
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.\S+ of the model is missing"):
        make_learner(path, load=save(tmp_path / "frozen", frozen, RunState(1, "d" * 64, ("batch-0",))))


def test_tied_embeddings(tmp_path: Path) -> None:
    save_mtp_model(tmp_path, "glm4_moe", tied=True)
    learner, samples = make_learner(tmp_path), make_samples(4, seed=3)
    metrics = train(learner, make_batch(samples, 0, [range(4)]), samples)
    assert metrics["train/mtp_loss"] > 0
    export_hf(learner, tmp_path, tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    embedding = exported["model.embed_tokens.weight"]
    assert torch.equal(exported["model.layers.3.shared_head.head.weight"], embedding)


def test_a_layer_with_an_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    save_mtp_model(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.embed_tokens.weight"][5] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.3\.embed_tokens\.weight is not model\.embed_tokens\.weight"):
        make_learner(tmp_path)
    make_learner(tmp_path, factor=0.0)


@pytest.mark.parametrize(("family", "layers"), [("qwen3", 0), ("glm4_moe", 0), ("glm4_moe", 2)])
def test_models_without_one_layer_are_refused(family: str, layers: int, tmp_path: Path) -> None:
    more: dict[str, Any] = {"num_nextn_predict_layers": layers} if layers else {}
    save_model(tmp_path, family, **more)
    spec = make_spec(tmp_path, trainer={"mtp_loss_scaling_factor": 0.1})
    with pytest.raises(
        ModelError, match=rf"trainer\.mtp_loss_scaling_factor = 0\.1: num_nextn_predict_layers .* is {layers}"
    ):
        run_model(spec)
