"""Repairs of megatron-core 0.19.2 that matter on every device without Transformer Engine.

The first three concern the distributed optimizer over torch's AdamW, which keeps its step count as a tensor beside each
parameter's moments, where Apex and Transformer Engine keep one number for each group:

1. asking for the state before the first step fails, because there is no step yet;
2. loading parameter state fails, because the checkpoint has no step beside the moments;
3. loading gives all parameters the same step tensor, so that every optimizer step then counts once per parameter and
   the bias correction is silently wrong;
4. a checkpoint that is written in this process still starts a helper process, to hold a queue between processes.
"""

from __future__ import annotations

import queue
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_set_states = DistributedOptimizer._set_main_param_and_optimizer_states
_load_state_dict = DistributedOptimizer.load_state_dict


def _set_states_without_step(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
    _set_states(self, model_param, {"step": None, **tensors})


def _load_state_dict_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
    _load_state_dict(self, state_dict)
    for state in self.optimizer.state.values():
        state["step"] = state["step"].clone()


def install() -> None:
    """Repair 2, 3 and 4, for the whole process. Idempotent."""
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_without_step
    DistributedOptimizer.load_state_dict = _load_state_dict_with_own_steps
    filesystem_async._results_queue = queue.SimpleQueue()


def give_initial_state(optimizer: torch.optim.Optimizer) -> None:
    """Repair 1: the state that AdamW would give each parameter at its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
