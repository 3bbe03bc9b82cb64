"""One rank of several on gloo: models in many layouts against the checkpoint and the logits of one process.

    python -m tests.trainer_layouts RANK WORLD STORE_FILE CASES

CASES is JSON: [[checkpoint, sizes of the layout], ...]. Ends with an error if anything differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from services.trainer import megatron
from services.trainer.hf_mapping import hf_tensors, load_hf
from services.trainer.layout import Layout
from services.trainer.megatron import DEVICE, get_forward_backward_func, parallel_state
from services.trainer.model import PolicyModel, build_model
from services.trainer.model_config import read_config
from tests.tiny_models import VOCABULARY

TOKENS = 48
LOGITS = "logits.pt"
"""In the folder of a checkpoint: what Hugging Face's model makes of `sequence`, [1, TOKENS, vocabulary]."""


def sequence() -> torch.Tensor:
    """[1, TOKENS] token ids."""
    return torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))


def check(checkpoint: Path, layout: Layout) -> None:
    """Load, compare every tensor bit for bit, and the logits."""
    model = read_config(checkpoint)
    module = build_model(model, torch.float32, layout)
    load_hf(module, model, checkpoint)
    original = load_file(checkpoint / "model.safetensors")
    mine = {name: tensor.clone() for name, tensor in hf_tensors(module, model)}
    for name, tensor in mine.items():
        assert torch.equal(tensor, original[name]), f"{name} in {layout}"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, set(mine))
    assert set().union(*everywhere) == set(original), f"{layout}: tensors that no rank has"
    if (logits := logits_of(module)) is not None:
        gap = float((logits - torch.load(checkpoint / LOGITS)).abs().max())
        assert gap <= 1e-5, f"logits in {layout} are {gap:.1e} apart"


@torch.no_grad()
def logits_of(module: PolicyModel) -> torch.Tensor | None:
    """[1, TOKENS, vocabulary] on the last stage."""

    def forward(_data: object, stage: Any) -> tuple[torch.Tensor, Any]:
        positions = torch.arange(TOKENS, device=DEVICE)[None]
        return stage(sequence().to(DEVICE), positions, None), lambda output, **_: output

    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(()),
        model=module,
        num_microbatches=1,
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
    for checkpoint, sizes in cases:
        layout = Layout(**sizes)
        megatron.open_groups(1, **layout.sizes)
        check(Path(checkpoint), layout)
        parallel_state.destroy_model_parallel()
        if rank == 0:
            print("equal:", Path(checkpoint).name, sizes, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
