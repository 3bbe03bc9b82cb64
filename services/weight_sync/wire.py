"""Bytes of a bucket: tensors in order, each padded to 16 bytes with zeros.

A plain tensor is its elements, row-major. A quantised one is its float8_e4m3fn values, then its float32 scales, both
row-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from services.weight_sync.layout import offsets, scale_shape
from services.weight_sync.quantize import dequantize, quantize
from services.weight_sync.records import WireBucket, WireFormat, WireTensor


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name such as bfloat16."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def encode_bucket(bucket: WireBucket, tensors: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Encode the tensors of a bucket.

    Args:
        bucket: What goes where.
        tensors: By HF name, at least those of the bucket.
        device: Where to encode, and where the bytes stay.

    Returns:
        [bucket.wire_bytes] uint8.

    Raises:
        ValueError: A tensor to be quantised is not finite.
    """
    buffer = torch.zeros(bucket.wire_bytes, dtype=torch.uint8, device=device)
    for tensor, start in offsets(bucket):
        _encode(tensor, tensors[tensor.name].to(device), buffer[start : start + tensor.wire_bytes])
    return buffer


def decode_bucket(
    bucket: WireBucket, buffer: torch.Tensor, model_dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Decode the tensors of a bucket, one at a time: plain ones as views of the buffer, quantised ones as new tensors.

    Args:
        bucket: What lies where.
        buffer: [bucket.wire_bytes] uint8.
        model_dtype: dtype of the tensors that were quantised.
    """
    for tensor, start in offsets(bucket):
        yield tensor.name, _decode(tensor, buffer[start : start + tensor.wire_bytes], model_dtype)


def _encode(tensor: WireTensor, x: torch.Tensor, out: torch.Tensor) -> None:
    assert tuple(x.shape) == tensor.shape, f"{tensor.name}: {tuple(x.shape)} is not the planned {tensor.shape}"
    if tensor.format is WireFormat.PLAIN:
        out.copy_(_bytes(x.to(torch_dtype(tensor.dtype))))
        return
    values, scales = quantize(x, tensor.name)
    out[: values.numel()].copy_(_bytes(values))
    out[values.numel() :].copy_(_bytes(scales))


def _decode(tensor: WireTensor, data: torch.Tensor, model_dtype: torch.dtype) -> torch.Tensor:
    if tensor.format is WireFormat.PLAIN:
        return data.view(torch_dtype(tensor.dtype)).view(tensor.shape)
    rows, columns = tensor.shape
    values = data[: rows * columns].view(torch.float8_e4m3fn).view(rows, columns)
    scales = data[rows * columns :].clone().view(torch.float32)  # a copy, because the values may end anywhere
    return dequantize(values, scales.view(scale_shape(tensor.shape)), model_dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
