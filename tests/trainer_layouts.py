"""One rank of several on gloo: models in many layouts against the checkpoint, the logits and the steps of one process.

    python -m tests.trainer_layouts RANK WORLD STORE_FILE CASES

CASES is JSON: [[checkpoint, sizes of the layout, settings of the trainer], ...]. Ends with an error if anything
differs.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from services.common.spec import ParallelSpec
from services.trainer import megatron
from services.trainer.hf_mapping import hf_tensors, load_hf
from services.trainer.megatron import DEVICE, get_forward_backward_func, parallel_state
from services.trainer.model import PolicyModel, build_model
from services.trainer.model_config import read_config
from services.trainer.report import Metrics, train_metrics
from services.trainer.step import Learner
from tests.tiny_models import VOCABULARY
from tests.trainer_cases import make_batch, make_samples, make_spec

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
    model = read_config(checkpoint)
    chunks = build_model(model, torch.float32, parallel)
    load_hf(chunks, model, checkpoint)
    original = load_file(checkpoint / "model.safetensors")
    mine = {name: tensor.clone() for name, tensor in hf_tensors(chunks, model)}
    for name, tensor in mine.items():
        assert torch.equal(tensor, original[name]), f"{name} in {parallel}"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, set(mine))
    assert set().union(*everywhere) == set(original), f"{parallel}: tensors that no rank has"
    if parallel.context == 1 and (logits := logits_of(chunks)) is not None:
        gap = float((logits - torch.load(checkpoint / LOGITS)).abs().max())
        assert gap <= 1e-5, f"logits in {parallel} are {gap:.1e} apart"


def train(checkpoint: Path, parallel: ParallelSpec, settings: Mapping[str, Any]) -> list[Metrics]:
    """Metrics and tokens of three optimizer steps, each on four packs that data-parallel ranks share."""
    sections: dict[str, Any] = {"optimizer": {"lr": 1e-3}, "parallel": parallel.model_dump(), "trainer": settings}
    spec = make_spec(checkpoint, ranks=dist.get_world_size(), **sections)
    learner = Learner(spec, read_config(checkpoint))
    learner.load_initial_weights()
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    found = []
    for number in range(3):
        samples = make_samples(8, seed=number)
        batch = make_batch(samples, number, [[0, 1], [2], [3, 4, 5], [6, 7]])
        mine = learner.train(replace(batch, micro_batches=batch.micro_batches[replica::replicas]), samples)
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, mine)
        metrics = {name: value for name, value in train_metrics(reports).items() if name not in TIMES}
        found.append({**metrics, "tokens": sum(one.tokens for one in reports)})
    return found


def check_steps(checkpoint: Path, parallel: ParallelSpec, settings: Mapping[str, Any]) -> None:
    """Against what one process wrote; one process writes it."""
    found, file = train(checkpoint, parallel, settings), checkpoint / "steps.json"
    if dist.get_world_size() == 1:
        file.write_text(json.dumps(found))
    for step, (ours, theirs) in enumerate(zip(found, json.loads(file.read_text()), strict=True)):
        for name, one in ours.items():
            close = math.isclose(one, theirs[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            assert close, f"{name} of step {step} in {parallel}: {one} for {theirs[name]}"


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


def main() -> None:
    rank, world, store, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    file_store = dist.FileStore(store, world)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world)
    for checkpoint, sizes, settings in cases:
        parallel = ParallelSpec(**sizes)
        megatron.open_groups(1, parallel)
        check(Path(checkpoint), parallel)
        check_steps(Path(checkpoint), parallel, settings)
        parallel_state.destroy_model_parallel()
        if rank == 0:
            print("equal:", Path(checkpoint).name, sizes, settings, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
