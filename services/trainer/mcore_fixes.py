"""Repairs of megatron-core 0.19.2 that matter on every device without Transformer Engine.

1. the distributed optimizer over torch's AdamW has no state to save or to load into before the first step;
2. a checkpoint that is written in this process still starts a helper process, to hold a queue between processes;
3. the norm of the gradients waits for the device once for each parameter, and clipping copies every gradient;
4. with tensor parallelism, latent attention with column-parallel down-projections loses the other ranks' part of the
   gradient of the keys' rotary part, which every rank has whole: gathering them splits in the backward pass, and does
   not add;
5. without gradients, as in the first pass of what is computed again, the router leaves a token's experts unsorted, and
   adds up their scores in another order.
"""

from __future__ import annotations

import queue
from typing import Any

import torch
from megatron.core import utils
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import router
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

_route = router.topk_routing_with_score_function


def _l2_norm(
    _chunk: int, _flag: torch.Tensor, lists: list[list[torch.Tensor]], *_: object
) -> tuple[torch.Tensor, None]:
    """`[1]` norm of all tensors together."""
    norms = torch._foreach_norm(lists[0])  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def _scale(_chunk: int, _flag: torch.Tensor, lists: list[list[torch.Tensor]], factor: float) -> None:
    """Clipping gives the gradients as source and as target."""
    torch._foreach_mul_(lists[1], factor)  # pyright: ignore[reportPrivateImportUsage]


def _route_in_order(*args: Any, **kwargs: Any) -> Any:
    """Whether gradients are wanted is how it decides; scores without gradients still get none."""
    with torch.enable_grad():
        return _route(*args, **kwargs)


def install() -> None:
    """Repairs 2, 3 and 5, for the whole process; 3 only where there is no faster kernel. Idempotent."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _l2_norm, _scale
    filesystem_async._results_queue = queue.SimpleQueue()
    router.topk_routing_with_score_function = _route_in_order


def give_initial_state(optimizer: torch.optim.Optimizer, fused: bool) -> None:
    """Repair 1: the state that AdamW would give each parameter at its first step.

    With `fused` every step is one kernel for all parameters, whose step counts then lie beside them.
    """
    for group in optimizer.param_groups:
        group["fused"] = fused
        for parameter in group["params"]:
            zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            step = torch.zeros((), device=parameter.device if fused else "cpu")
            optimizer.state[parameter] = {"step": step, **zeros}


class LatentSelfAttention(MLASelfAttention):
    """Repair 4: keys and values come as from a projection that is not cut, each rank with its part of the sequence.

    Megatron then gathers the rotary part along the sequence, which adds in the backward pass. Needs sequence
    parallelism where there is tensor parallelism.
    """

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys_values = super()._qkv_down_projection(hidden_states)
        if keys_values.shape[-1] != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            keys_values = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(keys_values))
        return queries, keys_values
