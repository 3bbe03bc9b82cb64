"""Loss and gradients of supervised fine-tuning against the cross-entropy of Hugging Face's model. Nothing is faked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.spec.sft import SftSpec
from services.trainer import megatron
from services.trainer.model_config import read_config
from services.trainer.sft.run import batch_layout
from services.trainer.sft.samples import SftSample, make_batch
from services.trainer.step import Learner
from tests.integration.test_trainer_parity import gradients, hf_gradients
from tests.sft_cases import make_case
from tests.tiny_models import save_model

pytestmark = pytest.mark.stack
NO_CLIP = {"clip_grad": 1e9}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    megatron.initialize(seed=1)
    yield
    megatron.destroy()


def hf_loss(hf: Any, samples: Sequence[SftSample]) -> torch.Tensor:
    """Mean over the learned tokens of all samples, each in a forward of its own."""
    losses = []
    for one in samples:
        tokens, mask = torch.tensor(one.tokens), torch.tensor(list(one.mask), dtype=torch.bool)
        logits = hf(tokens[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits[mask[1:]], tokens[1:][mask[1:]], reduction="none"))
    return torch.cat(losses).mean()


def loss_and_gradients(spec: SftSpec, samples: Sequence[SftSample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Of the first step of a run on these samples."""
    model = read_config(spec.model.hf_checkpoint)
    learner = Learner(spec, model)
    learner.load_initial_weights()
    made = make_batch(0, samples, batch_layout(spec, model), rank=0)
    before = learner.evaluate(made.batch, made.samples)
    report = learner.train(made.batch, made.samples)
    assert abs(before - report.loss) <= 1e-6, "evaluation computes the same"
    return report.loss, {name: one.clone() for name, one in gradients(learner).items()}


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_loss_and_gradients_are_those_of_hugging_face(family: str, tmp_path: Path) -> None:
    hf = save_model(tmp_path, family, seed=3)
    spec, data = make_case(tmp_path, tmp_path, optimizer=NO_CLIP)
    expected = hf_loss(hf, data.samples)
    expected.backward()
    loss, grads = loss_and_gradients(spec, data.samples)
    assert abs(loss - float(expected.detach())) <= 1e-5
    for name, grad in hf_gradients(hf):
        assert (grads[name] - grad).abs().max() <= 1e-5, name


def test_loss_and_gradients_do_not_depend_on_packing(tiny_qwen3: Path, tmp_path: Path) -> None:
    found = []
    for limit in (1, 200, 100_000):
        spec, data = make_case(tmp_path, tiny_qwen3, optimizer=NO_CLIP, trainer={"max_tokens_per_micro_batch": limit})
        found.append(loss_and_gradients(spec, data.samples))
    (loss, grads), *others = found
    for other_loss, other_grads in others:
        assert abs(loss - other_loss) <= 1e-6
        for name, grad in grads.items():
            assert (grad - other_grads[name]).abs().max() <= 1e-6, name
