"""Bytes of a bucket: tensors in order, each padded to 16 bytes with zeros.

A plain tensor is its elements, row-major. A quantised one is its float8_e4m3fn values, padded likewise, then its
float32 scales, both row-major.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from services.weight_sync.layout import offsets, padded, scales_offset
from services.weight_sync.quantize import Placement, dequantize, quantize_into, values_and_scales
from services.weight_sync.records import WireBucket, WireFormat, WireTensor


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as bfloat16."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def encode_bucket(
    bucket: WireBucket, tensors: Mapping[str, torch.Tensor], device: torch.device, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Encode the tensors of a bucket, straight into its bytes. On CUDA it waits for the device at most once.

    Args:
        bucket: What goes where.
        tensors: By HF name, at least those of the bucket.
        device: Where to encode, and where the bytes stay.
        out: [bucket.wire_bytes] uint8 on `device` to be filled, at a multiple of 16; new memory if None.

    Returns:
        [bucket.wire_bytes] uint8: `out`, if given.

    Raises:
        ValueError: A tensor to be quantised is not finite.
    """
    buffer = torch.empty(bucket.wire_bytes, dtype=torch.uint8, device=device) if out is None else out
    assert len(buffer) == bucket.wire_bytes, f"{len(buffer)} bytes for a bucket of {bucket.wire_bytes}"
    matrices = []
    for tensor, start in offsets(bucket):
        x = tensors[tensor.name].to(device)
        assert x.shape == tensor.shape, f"{tensor.name}: {tuple(x.shape)} is not the planned {tensor.shape}"
        if tensor.format is WireFormat.PLAIN:
            _plain(tensor, buffer[start:]).copy_(x)
        else:
            matrices.append(Placement(tensor.name, x, start))
        for first, end in _gaps(tensor):
            if first < end:
                buffer[start + first : start + end].zero_()
    quantize_into(buffer, matrices)
    return buffer


def decode_bucket(
    bucket: WireBucket, buffer: torch.Tensor, model_dtype: torch.dtype, keep_fp8: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Decode the tensors of a bucket, one at a time: plain ones as views of the buffer, quantised ones as new tensors.

    Args:
        bucket: What lies where.
        buffer: [bucket.wire_bytes] uint8, at an address that is a multiple of 16.
        model_dtype: dtype of the tensors that were quantised.
        keep_fp8: Yield a quantised [R, C] tensor as two views of the buffer instead: its float8_e4m3fn values, and
            after them, as `<name>_scale_inv`, its float32 scales [B, D].
    """
    for tensor, start in offsets(bucket):
        data = buffer[start:]
        if tensor.format is WireFormat.PLAIN:
            yield tensor.name, _plain(tensor, data)
            continue
        values, scales = values_and_scales(data, tensor.shape)
        if keep_fp8:
            yield tensor.name, values
            yield f"{tensor.name}_scale_inv", scales
        else:
            yield tensor.name, dequantize(values, scales, model_dtype)


def _plain(tensor: WireTensor, data: torch.Tensor) -> torch.Tensor:
    """The elements of a plain tensor, as a view of its bytes."""
    return data[: tensor.wire_bytes].view(torch_dtype(tensor.dtype)).view(tensor.shape)


def _gaps(tensor: WireTensor) -> list[tuple[int, int]]:
    """First byte and end of what lies behind the elements, and in a quantised tensor between values and scales."""
    gaps = [(tensor.wire_bytes, padded(tensor.wire_bytes))]
    if tensor.format is WireFormat.FP8_BLOCK_128:
        gaps.append((math.prod(tensor.shape), scales_offset(tensor.shape)))
    return gaps
