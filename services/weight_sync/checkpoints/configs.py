"""config.json of what is converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.weight_sync.checkpoints.formats import SECTIONS
from services.weight_sync.layout import Scaling

DTYPE_FIELDS = ("torch_dtype", "dtype")
BF16 = "bfloat16"


def bf16_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without quantisation, and bfloat16 wherever it names the dtype of the model."""
    plain = _without_quantisation(config)
    if not any(field in part for part in _parts(plain) for field in DTYPE_FIELDS):
        plain["torch_dtype"] = BF16
    for part in _parts(plain):
        part.update({field: BF16 for field in DTYPE_FIELDS if field in part})
    return plain


def fp8_config(config: Mapping[str, Any], scaling: Scaling, plain_modules: Sequence[str]) -> dict[str, Any]:
    """The config with a `quantization_config` that vLLM reads; the old one, if any, goes.

    Args:
        config: Of the source.
        scaling: Of the matrices. Rows are written as compressed-tensors, blocks and matrices as vLLM's fp8, since
            vLLM takes experts with one scale for a matrix in that form only.
        plain_modules: Linear layers that are not quantised.
    """
    by_row = scaling.rows and not scaling.columns
    section = _channel_section(plain_modules) if by_row else _fp8_section(scaling, plain_modules)
    return {**_without_quantisation(config), "quantization_config": section}


def _fp8_section(scaling: Scaling, plain_modules: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        **({"weight_block_size": [scaling.rows, scaling.columns]} if scaling.rows else {}),
        **({"scale_fmt": "ue8m0"} if scaling.ue8m0 else {}),
        "modules_to_not_convert": list(plain_modules),
    }


def _channel_section(plain_modules: Sequence[str]) -> dict[str, Any]:
    e4m3 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**e4m3, "strategy": "channel", "dynamic": False}
    activations = {**e4m3, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(plain_modules),
    }


def _without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in config.items() if name not in SECTIONS}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = {name: one for name, one in plain["text_config"].items() if name not in SECTIONS}
    return plain


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config, and the nested one of the language model."""
    return [config, *([config["text_config"]] if isinstance(config.get("text_config"), dict) else [])]
