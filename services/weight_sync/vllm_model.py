"""What the receiver needs to know of a model inside vLLM 0.24 to 0.32, and to put right in it."""

from __future__ import annotations

from typing import Any

import torch

from services.weight_sync.manifest import LoadedModel

FP8 = torch.float8_e4m3fn
ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Linear layers that no recipe quantises; vLLM has no class for them in every model."""

ATTENTION_SCALES = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")


def describe_model(model: torch.nn.Module, config: Any) -> LoadedModel:
    """The facts of a loaded model.

    An engine that serves fp8 wants as fp8 what it holds as fp8, which vLLM decided when it built the model; any other
    one can take every matrix of a linear layer or expert dequantised.

    Args:
        model: vLLM's model.
        config: vLLM's ModelConfig.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LinearBase | RoutedExperts)
        and name.rpartition(".")[2] not in ROUTERS
        and (not serves_fp8(config) or _is_fp8(module))
    }
    experts = [name for name, module in modules.items() if isinstance(module, RoutedExperts)]
    return LoadedModel(
        linear_modules=set(modules) - set(experts),
        expert_modules={name[: name.index(".experts") + len(".experts")] for name in experts},
        packed_modules=getattr(model, "packed_modules_mapping", {}),
        parameter_dtypes={name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()},
        dtype=str(config.dtype).removeprefix("torch."),
        tied=bool(config.hf_config.tie_word_embeddings),
        layer_count=config.hf_config.num_hidden_layers,
    )


def serves_fp8(config: Any) -> bool:
    """True if a ModelConfig of vLLM says that linear layers are held as block fp8."""
    return config.quantization == "fp8"


def restore_attention_scales(model: torch.nn.Module) -> None:
    """Set the scales of the KV cache to 1, in place: dummy weights fill them at random, and no update brings them."""
    for module in model.modules():
        for scale in ATTENTION_SCALES if hasattr(module, "_prob_scale") else ():
            getattr(module, scale).fill_(1.0)
            setattr(module, f"{scale}_float", 1.0)


def _is_fp8(module: torch.nn.Module) -> bool:
    return any(parameter.dtype == FP8 for parameter in module.parameters(recurse=False))
