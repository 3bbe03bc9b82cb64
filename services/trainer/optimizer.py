"""AdamW through Megatron's distributed optimizer: its rate, clipping, and no step on a gradient that is not finite."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.common.spec import OptimizerSpec
from services.trainer.mcore_fixes import give_initial_state
from services.trainer.megatron import (
    MTP_GRAD_NORM_GROUP,
    ON_CUDA,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    finalize_model_grads,
    get_megatron_optimizer,
)
from services.trainer.model import PolicyModel

STATE = ("param", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each element, in float32: the weight itself, and the moments."""
UNIT_LOSS_SCALE = 1.0
"""A loss scale, even this one, has Megatron look for gradients that are not finite, and skip their step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    applied: bool
    """False if a gradient was not finite; weights and moments are as before."""
    grad_norm: float
    """Global norm before clipping, without multi-token prediction, which is clipped by itself; 0 if not applied."""
    mtp_grad_norm: float
    """Of multi-token prediction; 0 if not applied, or if it is not trained."""


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Rate of optimizer step `step`, from 0: linear to `lr` over the warm-up, then constant or along half a cosine."""
    if step < spec.warmup_steps or spec.lr_decay == "constant":
        return spec.lr * min(1.0, (step + 1) / max(1, spec.warmup_steps))
    fallen = min(1.0, (step - spec.warmup_steps) / max(1, spec.lr_decay_steps - spec.warmup_steps))
    return spec.min_lr + (spec.lr - spec.min_lr) * (1 + math.cos(math.pi * fallen)) / 2


class Optimizer:
    """The gradients of a rank's part of a model, and how they are applied."""

    def __init__(self, chunks: Sequence[PolicyModel], spec: OptimizerSpec, overlap: bool = False) -> None:
        self._spec, self._overlap = spec, overlap
        model_config = chunks[0].config
        dtype = model_config.params_dtype
        buffers = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        )
        self.ddp = [
            DistributedDataParallel(model_config, buffers, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        config = OptimizerConfig(
            optimizer="adam",
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            adam_beta1=spec.adam_beta1,
            adam_beta2=spec.adam_beta2,
            adam_eps=spec.adam_eps,
            clip_grad=spec.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            loss_scale=UNIT_LOSS_SCALE,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
        )
        self.megatron: Any = get_megatron_optimizer(config, [*self.ddp])
        self._parts = [one for one in self.megatron.chained_optimizers if not one.is_stub_optimizer]
        for part in self._parts:
            give_initial_state(part.optimizer, fused=ON_CUDA)
        model_config.finalize_model_grads_func = self._sum_gradients
        if overlap:
            delays: Any = [chunk.no_sync for chunk in self.ddp]
            setattr(model_config, "no_sync_func", delays if len(delays) > 1 else delays[0])  # noqa: B010  wrongly typed
        self.ready_s = 0.0
        """Monotonic time when this rank last had its own gradients."""

    def reload(self) -> None:
        """Take the model's weights over, after they were loaded from elsewhere."""
        self.megatron.reload_model_params()

    def zero_gradients(self) -> None:
        """Start an optimizer step."""
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, number: int) -> StepResult:
        """Apply the gradients as optimizer step `number` of the run, from 0."""
        for group in self.megatron.param_groups:
            group["lr"] = learning_rate(self._spec, number)
            group["weight_decay"] = self._spec.weight_decay * group["wd_mult"]
        applied, grad_norm, _ = self.megatron.step()
        if not applied:
            return StepResult(False, 0.0, 0.0)
        of_mtp = self.megatron.grad_norms_by_group.get(MTP_GRAD_NORM_GROUP, 0.0)
        return StepResult(True, float(grad_norm), float(of_mtp))

    def fetch_weights(self) -> None:
        """Have the weights whole here, of which a rank updates a part; with overlap the next forward pass would do it.

        All data-parallel ranks must call it before anybody reads them.
        """
        if self._overlap:
            for chunk in self.ddp:
                chunk.start_param_sync(force_sync=True)

    def shards(self) -> Iterator[tuple[Tensor, int, dict[str, Tensor]]]:
        """What this rank updates: a weight, the first of its elements that are this rank's, and their flat state.

        The state is the float32 weights and moments by Megatron's names, themselves and no copies.
        """
        for part in self._parts:
            buckets = [one for buffer in part.gbuf_ranges for several in buffer.values() for one in several]
            for weight, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
                state = part._get_main_param_and_optimizer_states(weight)
                yield weight, ranges["param"].start, {name: state[name] for name in STATE}

    @property
    def applied_steps(self) -> int:
        """Optimizer steps that changed the weights, for the correction of the moments' bias."""
        return int(next(self._step_counts(), 0))

    @applied_steps.setter
    def applied_steps(self, count: int) -> None:
        for one in self._step_counts():
            one.fill_(count)

    def _step_counts(self) -> Iterator[Tensor]:
        """Of every weight that this rank updates, all the same."""
        yield from (state["step"] for part in self._parts for state in part.optimizer.state.values())

    def _sum_gradients(self, models: list[torch.nn.Module], _num_tokens: torch.Tensor, **kwargs: object) -> None:
        """Megatron's reduction without its division: the loss is normalised already."""
        self.ready_s = time.monotonic()
        finalize_model_grads(models, None, **kwargs)  # pyright: ignore[reportArgumentType]
