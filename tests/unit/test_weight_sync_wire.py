"""Bytes of a bucket, there and back. Nothing is faked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.weight_sync.layout import encoded_bytes, padded
from services.weight_sync.records import WireBucket, WireFormat, WireTensor
from services.weight_sync.wire import decode_bucket, encode_bucket
from tests import weight_sync_oracles as oracle

CPU = torch.device("cpu")
FP8, PLAIN = WireFormat.FP8_BLOCK_128, WireFormat.PLAIN


def wire(name: str, x: torch.Tensor, form: WireFormat, dtype: str | None = None) -> WireTensor:
    dtype = dtype or str(x.dtype).removeprefix("torch.")
    return WireTensor(name, tuple(x.shape), dtype, form, encoded_bytes(x.shape, dtype, form))


def bucket_of(*tensors: WireTensor) -> WireBucket:
    return WireBucket(0, tensors, sum(padded(tensor.wire_bytes) for tensor in tensors))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_bytes_are_as_the_contract_says():
    a, q = noise(3), noise(5, 7)
    bucket = bucket_of(wire("a", a, PLAIN), wire("q", q, FP8), wire("b", a, PLAIN))
    data = encode_bucket(bucket, {"a": a, "q": q, "b": a}, CPU).numpy().tobytes()
    codes, scales = oracle.quantize(q.numpy())
    plain = a.numpy().tobytes() + bytes(4)
    assert data == plain + codes.tobytes() + scales.tobytes() + bytes(9) + plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_tensors_come_back_bit_for_bit(dtype):
    tensors = {
        "vector": noise(7).to(dtype),
        "matrix": noise(5, 9).T.to(dtype),
        "cube": noise(2, 3, 4).to(dtype),
    }
    bucket = bucket_of(*(wire(name, x, PLAIN) for name, x in tensors.items()))
    decoded = dict(decode_bucket(bucket, encode_bucket(bucket, tensors, CPU), torch.float32))
    assert decoded.keys() == tensors.keys()
    assert all(decoded[name].dtype == dtype and decoded[name].equal(x) for name, x in tensors.items())


@pytest.mark.parametrize("shape", [(128, 128), (5, 7), (130, 257)])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_quantised_tensors_come_back_as_the_oracle_says(shape, model_dtype):
    x = noise(*shape)
    bucket = bucket_of(wire("odd", noise(3), PLAIN), wire("q", x, FP8))
    decoded = dict(decode_bucket(bucket, encode_bucket(bucket, {"odd": noise(3), "q": x}, CPU), model_dtype))
    expected = torch.from_numpy(oracle.dequantize(*oracle.quantize(x.numpy()))).to(model_dtype)
    assert decoded["q"].equal(expected)


def test_a_plain_tensor_is_rounded_to_the_dtype_of_the_plan():
    x = noise(40)
    bucket = bucket_of(wire("a", x, PLAIN, "bfloat16"))
    [(_, decoded)] = decode_bucket(bucket, encode_bucket(bucket, {"a": x}, CPU), torch.bfloat16)
    assert decoded.equal(x.bfloat16())


def test_a_tensor_that_is_not_finite_is_an_error_that_names_it():
    x = noise(4, 4)
    x[0, 0] = np.nan
    bucket = bucket_of(wire("layers.0.q", x, FP8))
    with pytest.raises(ValueError, match=r"layers\.0\.q"):
        encode_bucket(bucket, {"layers.0.q": x}, CPU)
