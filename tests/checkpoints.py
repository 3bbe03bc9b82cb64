"""Small checkpoints in Hugging Face layout, for tests; written with the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.weight_sync_oracles import e4m3_codes, e4m3_values

INDEX = "model.safetensors.index.json"
Tensors = Mapping[str, torch.Tensor]

GLM_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
"""quantization_config of a checkpoint with a scale for each row."""
R1_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSOR_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


def with_strategy(strategy: str, **weights: object) -> dict[str, Any]:
    """compressed-tensors' config with another strategy."""
    content = json.loads(json.dumps(GLM_FP8))
    content["config_groups"]["group_0"]["weights"] |= {"strategy": strategy, **weights}
    return content


def save_checkpoint(directory: Path, shards: Sequence[Tensors], config: Mapping[str, Any]) -> Path:
    """Write a checkpoint: one file without an index, or several with one."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(content))
    for file, shard in zip(names, shards, strict=True):
        save_file(dict(shard), directory / file, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, by the index where there is one, which must name each where it is."""
    tensors = {file.name: load_file(file) for file in sorted(directory.glob("*.safetensors"))}
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text())
        assert index["weight_map"] == {name: file for file, shard in tensors.items() for name in shard}
        total = sum(tensor.nbytes for shard in tensors.values() for tensor in shard.values())
        assert index["metadata"]["total_size"] == total
    return {name: tensor for shard in tensors.values() for name, tensor in shard.items()}


def read_config(directory: Path) -> dict[str, Any]:
    """config.json."""
    return json.loads((directory / "config.json").read_text())


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file, by its path in the directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def random_matrix(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers whose size differs from block to block."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rows * 1009 + columns)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp2(torch.randint(-6, 3, (rows, 1), generator=generator))).to(dtype)


def oracle_quantize(x: torch.Tensor, block: tuple[int, int], *, ue8m0: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Codes [R, C] uint8 and scales [B, D] float32, a block at a time; 0 rows or columns of a block: all."""
    values = x.to(torch.float32).numpy()
    rows, columns = block[0] or values.shape[0], block[1] or values.shape[1]
    codes = np.empty(values.shape, np.uint8)
    scales = np.empty((-(-values.shape[0] // rows), -(-values.shape[1] // columns)), np.float32)
    for (b, d), _ in np.ndenumerate(scales):
        at = np.s_[b * rows : (b + 1) * rows, d * columns : (d + 1) * columns]
        scale = np.float32(max(np.abs(values[at]).max(), np.float32(1e-12))) / np.float32(448)
        scales[b, d] = np.exp2(np.ceil(np.log2(np.float64(scale)))) if ue8m0 else scale
        codes[at] = e4m3_codes(np.clip(values[at] / scales[b, d], np.float32(-448), np.float32(448)))
    return codes, scales


def oracle_dequantize(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """[R, C] float32."""
    rows, columns = block[0] or codes.shape[0], block[1] or codes.shape[1]
    spread = np.repeat(np.repeat(scales, rows, 0), columns, 1)[: codes.shape[0], : codes.shape[1]]
    return (e4m3_values(codes).astype(np.float32) * spread).astype(np.float32)


def fp8_pair(name: str, x: torch.Tensor, block: tuple[int, int], suffix: str = "_scale_inv") -> dict[str, torch.Tensor]:
    """A matrix as an fp8 checkpoint has it: values and scales."""
    codes, scales = oracle_quantize(x, block)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return {name: values, name + suffix: torch.from_numpy(scales if any(block) else scales.reshape(1))}


def codes_of(tensor: torch.Tensor) -> np.ndarray:
    """Codes of an fp8 tensor."""
    return tensor.view(torch.uint8).numpy()


def peak_memory_bytes() -> int:
    """Most memory that this program has had resident; getrusage begins with that of the program that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
