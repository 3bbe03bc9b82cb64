"""The one module through which the trainer imports megatron-core, and the choice of device and backend.

CUDA with NCCL where there is CUDA, else the CPU with gloo; the same code runs on both.
"""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta
from math import ceil
from typing import Any

import torch
import torch.distributed as dist

from services.common.spec import ParallelSpec, TrainerSpec
from services.trainer import mcore_cpu

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda") if ON_CUDA else torch.device("cpu")
BACKEND = "nccl" if ON_CUDA else "gloo"
MARGIN_S = 60.0
"""Ranks wait so much longer for each other than `trainer.hang_timeout_s`, so that a rank that stands still is named
first (services.trainer.watch)."""
ONE_RANK = ParallelSpec()

if not ON_CUDA:
    mcore_cpu.prepare_import()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of every optional package that is absent
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        is_main_replica,
    )
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, model_parallel_cuda_manual_seed
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel.random import checkpoint as recompute_in_backward
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
        get_transformer_layer_offset,
    )

from services.trainer import mcore_fixes  # noqa: E402  it imports megatron-core

__all__ = [
    "HAVE_TE",
    "MLP",
    "MTP_GRAD_NORM_GROUP",
    "AttnMaskType",
    "CheckpointingException",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "IdentityOp",
    "MLASelfAttentionSubmodules",
    "MLATransformerConfig",
    "MLPSubmodules",
    "MegatronModule",
    "MoEAlltoAllTokenDispatcher",
    "MoELayer",
    "MoESubmodules",
    "ModuleSpec",
    "MultiTokenPredictionBlock",
    "MultiTokenPredictionBlockSubmodules",
    "MultiTokenPredictionLayer",
    "MultiTokenPredictionLayerSubmodules",
    "OptimizerConfig",
    "PackedSeqParams",
    "RowParallelLinear",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "SharedExpertMLP",
    "TEDotProductAttention",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "dist_checkpointing",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_bias_dropout_add",
    "get_cuda_rng_tracker",
    "get_forward_backward_func",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "is_main_replica",
    "nested_values",
    "parallel_state",
    "recompute_in_backward",
    "reduce_scatter_to_sequence_parallel_region",
]


def initialize(
    seed: int, parallel: ParallelSpec = ONE_RANK, hang_timeout_s: float = TrainerSpec().hang_timeout_s
) -> None:
    """Meet all ranks, and open Megatron's groups. Call once, in the thread that trains; `destroy` undoes it."""
    meet(hang_timeout_s)
    open_groups(seed, parallel, hang_timeout_s)


def meet(hang_timeout_s: float) -> None:
    """Open the process group of all ranks.

    One rank meets itself in memory; several, as the environment says (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as
    torchrun sets them), and wait for each other, here and later, at most `hang_timeout_s` and a margin.
    """
    timeout = timedelta(seconds=hang_timeout_s + MARGIN_S)
    if world_size() == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(BACKEND, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(BACKEND, timeout=timeout)


def hush() -> None:
    """Let Megatron and torch say only what is wrong, where somebody reads along."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")


def world_size() -> int:
    """Ranks, as the environment says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Of this process, as the environment says."""
    return int(os.environ.get("RANK", "0"))


def open_groups(seed: int, parallel: ParallelSpec, hang_timeout_s: float = TrainerSpec().hang_timeout_s) -> None:
    """Open Megatron's groups in the process group, and seed the random state."""
    if not ON_CUDA:
        mcore_cpu.adopt_modules()
    else:
        seen = torch.cuda.device_count()  # the one of this rank, or those of all ranks of this machine
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % seen)
    mcore_fixes.install()
    sizes: dict[str, Any] = group_sizes(parallel)
    minutes = ceil((hang_timeout_s + MARGIN_S) / 60)
    parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=minutes)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def group_sizes(parallel: ParallelSpec) -> dict[str, int | None]:
    """By Megatron's names, for its groups and its configuration alike."""
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "context_parallel_size": parallel.context,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_stages if parallel.virtual_stages > 1 else None,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def weight_of(module: Any) -> Any:
    """The weight of a torch module, to be read without a call of the module; None if there is none.

    Megatron may have put off to fetch it until just before that call, and waits for it there.
    """
    if module is None:
        return None
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    return getattr(module, "weight", None)


def destroy() -> None:
    """Close all groups; nothing to do if none were opened."""
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
