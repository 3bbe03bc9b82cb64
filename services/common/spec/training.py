"""What every run of the trainer has: the model, the optimizer, the ranks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field

from services.common.errors import InvalidArgument
from services.common.run_checkpoints import STATE_FILE, why_no_checkpoint
from services.common.spec.base import SpecError, Strict

LAYOUT_SECTIONS = {"run_dir", "services", "redis", "parallel"}
"""What says where things run, not what they compute; left out of the spec digest."""


class ModelSpec(Strict):
    """The model."""

    hf_checkpoint: Path
    """Directory of a Hugging Face checkpoint: config, tokenizer, safetensors. Initial weights."""
    load: Path = Path()
    """Directory that `flotilla convert hf-to-torch-dist` wrote of it, or a checkpoint of another run: the trainer's
    initial weights, optimizer anew. Empty takes those of hf_checkpoint."""
    overrides: dict[str, Any] = {}
    """Fields of its config.json that have other values in this run, as `rope_theta`; tables are merged. For trainer,
    engines and exports alike."""


class OptimizerSpec(Strict):
    """AdamW, through Megatron's optimizer."""

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    lr_decay: Literal["constant", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall to `min_lr` along half a cosine."""
    lr_decay_steps: int = Field(default=0, ge=0)
    """Optimizer step at which it has fallen, counted from the start of the run; 0 takes the end of the run, which only
    supervised fine-tuning does."""
    min_lr: float = Field(default=0.0, ge=0)
    """Where it stays then."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled; not on norms and biases."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    clip_grad: float = Field(default=1.0, gt=0)
    """Largest global gradient norm."""


class TrainerSpec(Strict):
    """The trainer's process."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations; the optimizer keeps float32."""
    max_tokens_per_micro_batch: int = Field(default=8192, ge=1)
    """Packing limit; a longer sample goes alone."""
    balance_data: bool = False
    """Give the data-parallel ranks equal work, as estimated in FLOPs, instead of every n-th micro-batch."""
    mtp_loss_scaling_factor: float = Field(default=0.0, ge=0)
    """Factor of the loss of the layer for multi-token prediction, which then learns beside the policy; 0 leaves it as
    it is in the checkpoint."""
    save_interval: int = Field(default=20, ge=1)
    """A checkpoint every so many rollout steps, and at the end."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older ones are removed once a newer one is committed."""
    num_threads: int = Field(default=0, ge=0, le=4096)
    """CPU threads; 0 leaves it to torch."""
    hang_timeout_s: float = Field(default=600, gt=0, le=604800)
    """A rank that begins nothing new for so long has failed, and all ranks are started again."""
    seed: int = Field(default=1234, ge=0, lt=1 << 32)
    """Seed of Megatron's random-number states."""


class ParallelSpec(Strict):
    """How the model lies over the trainer's ranks; what is left of their number is data-parallel.

    Nothing here changes what is computed: a run may go on in another layout. Megatron's order, from neighbours
    outwards: tensor, context, expert, data, pipeline.
    """

    tensor: int = Field(default=1, ge=1)
    """Ranks that share every matrix, and the tokens between matrices (sequence parallelism)."""
    context: int = Field(default=1, ge=1)
    """Ranks that share the tokens of every sample. To the experts they are data-parallel ranks."""
    pipeline: int = Field(default=1, ge=1)
    """Stages of layers."""
    virtual_stages: int = Field(default=1, ge=1)
    """Parts of every stage, far from each other in the model (interleaved schedule): less of the time is spent waiting
    for other stages. The micro-batches of an optimizer step must then be a multiple of `pipeline`."""
    expert: int = Field(default=1, ge=1)
    """Ranks that share the experts of a layer."""
    expert_tensor: int = Field(default=1, ge=1)
    """Ranks that share the matrices of an expert."""
    first_stage_layers: int = Field(default=0, ge=0)
    """Layers of the first stage; 0 gives it as many as the others."""
    last_stage_layers: int = Field(default=0, ge=0)
    """Layers of the last stage; 0 gives it as many as the others."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are computed again in the backward pass instead of being kept: `selective` those inside
    attention and inside layers of experts, `full` all but the input of every layer. The gradients are the same."""
    overlap: bool = False
    """Sum gradients over data-parallel ranks during the backward pass, and fetch weights from them during the forward
    pass, a group of layers at a time; else before and after the optimizer."""

    @property
    def micro_batch_multiple(self) -> int:
        """Divides the number of micro-batches that a rank has in an optimizer step."""
        return self.pipeline if self.virtual_stages > 1 else 1

    @property
    def replica_ranks(self) -> int:
        """Ranks that hold one copy of the model, experts left out."""
        return self.tensor * self.context * self.pipeline

    @property
    def expert_replica_ranks(self) -> int:
        """Ranks that hold one copy of the experts."""
        return self.expert_tensor * self.expert * self.pipeline

    def check_ranks(self, ranks: int) -> None:
        """Raise InvalidArgument, naming the fields, if so many ranks cannot be laid out so."""
        copies = {
            "tensor x context x pipeline": self.replica_ranks,
            "expert_tensor x expert x pipeline": self.expert_replica_ranks,
        }
        for name, size in copies.items():
            if ranks % size:
                raise InvalidArgument(f"parallel: {name} = {size} does not divide the number of ranks, {ranks}")


class TrainingSpec(Strict):
    """What every run of the trainer has."""

    run_id: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """Name of the run: lower-case letters, digits, - and _."""
    run_dir: Path = Path()
    """Checkpoints, logs and metrics; runs/<run_id> unless given."""
    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    trainer: TrainerSpec = TrainerSpec()
    parallel: ParallelSpec = ParallelSpec()

    def digest(self) -> str:
        """SHA-256 over what defines the run, in hexadecimal; where it runs is left out."""
        content = self.model_dump(mode="json", exclude=LAYOUT_SECTIONS)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def files(self) -> dict[str, Path]:
        """What the run reads, by field."""
        return {"model.hf_checkpoint": self.model.hf_checkpoint / "config.json"}

    def check_files(self) -> None:
        """Raise SpecError if a file that the run reads is missing."""
        if self.model.load != Path() and not (self.model.load / STATE_FILE).is_file():
            raise SpecError(f"model.load: {why_no_checkpoint(self.model.load)}")
        for field, path in self.files().items():
            if not path.is_file():
                raise SpecError(f"{field}: there is no file {path}; correct the path in the run spec")

    def to_toml(self) -> str:
        """The resolved spec as TOML that can be read back; paths that are not given are left out."""
        return tomli_w.dumps(_without_empty_paths(self.model_dump()))


def _without_empty_paths(value: Any) -> Any:
    """A dumped spec, with paths as text, or without them where they are empty."""
    if isinstance(value, dict):
        return {name: _without_empty_paths(one) for name, one in value.items() if one != Path()}
    if isinstance(value, list | tuple):
        return [_without_empty_paths(one) for one in value]
    return str(value) if isinstance(value, Path) else value
