"""One rank of several: models in many layouts against the checkpoint, the logits and the steps of one process.

A case is a checkpoint and the sizes of a layout (tests.trainer_ranks). Ends with an error if anything differs.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from services.common.spec import ParallelSpec
from services.trainer.hf_mapping import hf_tensors, load_hf
from services.trainer.hf_mtp import copies_of, with_mtp_of
from services.trainer.megatron import DEVICE, get_forward_backward_func, parallel_state
from services.trainer.model import PolicyModel, build_model
from services.trainer.model_config import ModelConfig, read_config
from services.trainer.ranks import all_ranks
from services.trainer.report import Metrics, train_metrics
from services.trainer.step import Learner
from tests.tiny_models import VOCABULARY
from tests.trainer_cases import make_batch, make_samples, make_spec
from tests.trainer_ranks import run_cases

TOKENS = 48
TOLERANCE = 1e-5
"""Of metrics of a step. Terms of a loss are about 1, and cancel in part."""
TIMES = {"train/seconds", "train/tokens_per_second", "train/slowest_rank"}
"""Metrics that no two runs have in common."""
LOGITS = "logits.pt"
"""In the folder of a checkpoint: what Hugging Face's model makes of `sequence`, [1, TOKENS, vocabulary]."""


def sequence() -> torch.Tensor:
    """[1, TOKENS] token ids."""
    return torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def check(checkpoint: Path, parallel: ParallelSpec) -> None:
    """Load, compare every tensor bit for bit, and the logits."""
    model = model_of(checkpoint)
    chunks = build_model(model, torch.float32, parallel)
    load_hf(chunks, model, checkpoint)
    original = load_file(checkpoint / "model.safetensors")
    for copy in copies_of(model, original):
        del original[copy]
    mine = {name: tensor.cpu() for name, tensor in hf_tensors(chunks, model)}
    for name, tensor in mine.items():
        assert torch.equal(tensor, original[name]), f"{name} in {parallel}"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, list(mine))
    assert sorted(name for one in everywhere for name in one) == sorted(original), (
        f"{parallel}: each tensor on one rank"
    )
    if parallel.context == 1 and (logits := logits_of(chunks)) is not None:
        gap = float((logits.cpu() - torch.load(checkpoint / LOGITS)).abs().max())
        assert gap <= 1e-5, f"logits in {parallel} are {gap:.1e} apart"


def model_of(checkpoint: Path) -> ModelConfig:
    """With a layer for multi-token prediction, if the checkpoint has one."""
    return with_mtp_of(read_config(checkpoint), checkpoint)


def make_learner(checkpoint: Path, parallel: ParallelSpec) -> Learner:
    """One rank's, without weights."""
    model, world = model_of(checkpoint), dist.get_world_size()
    trainer = {"mtp_loss_scaling_factor": 0.3 * model.mtp_built}
    spec = make_spec(checkpoint, optimizer={"lr": 1e-3}, parallel=parallel.model_dump(), trainer=trainer, ranks=world)
    return Learner(spec, model)


def train_step(learner: Learner, number: int) -> Metrics:
    """Metrics and tokens of an optimizer step on four packs that data-parallel ranks share."""
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    samples = make_samples(8, seed=number)
    batch = make_batch(samples, number, [[0, 1], [2], [3, 4, 5], [6, 7]])
    mine = replace(batch, micro_batches=batch.micro_batches[replica::replicas])
    reports = all_ranks(learner.train(mine, samples))
    metrics = {name: value for name, value in train_metrics(reports).items() if name not in TIMES}
    return {**metrics, "tokens": sum(one.tokens for one in reports)}


def compare_steps(found: list[Metrics], expected: list[Metrics]) -> None:
    """All metrics, within the tolerance."""
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, one in ours.items():
            close = math.isclose(one, theirs[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            assert close, f"{name} of step {step}: {one} for {theirs[name]}"


def check_steps(checkpoint: Path, parallel: ParallelSpec) -> None:
    """Against what one process wrote; one process writes it."""
    learner, file = make_learner(checkpoint, parallel), checkpoint / "steps.json"
    learner.load_initial_weights()
    found = [train_step(learner, number) for number in range(3)]
    assert all((one["train/mtp_loss"] > 0) == learner.model.mtp_built for one in found)
    if dist.get_world_size() == 1:
        file.write_text(json.dumps(found))
    compare_steps(found, json.loads(file.read_text()))


@torch.no_grad()
def logits_of(chunks: list[PolicyModel]) -> torch.Tensor | None:
    """[1, TOKENS, vocabulary] on the last stage."""

    def forward(_data: object, stage: Any) -> tuple[torch.Tensor, Any]:
        positions = torch.arange(TOKENS, device=DEVICE)[None]
        return stage(sequence().to(DEVICE), positions, None), lambda output, **_: output

    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(())] * len(chunks),
        model=[*chunks],
        num_microbatches=parallel_state.get_pipeline_model_parallel_world_size(),
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    if not parallel_state.is_pipeline_last_stage():
        return None
    group: Any = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(found[0]) for _ in range(group.size())]
    dist.all_gather(parts, found[0].contiguous(), group=group)
    return torch.cat(parts, -1)


def check_case(checkpoint: str, sizes: dict[str, Any]) -> None:
    """One model in one layout."""
    check(Path(checkpoint), ParallelSpec(**sizes))
    check_steps(Path(checkpoint), ParallelSpec(**sizes))


if __name__ == "__main__":
    run_cases(check_case)
