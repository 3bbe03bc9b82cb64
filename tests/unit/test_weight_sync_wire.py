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


def mixed() -> tuple[WireBucket, dict[str, torch.Tensor]]:
    """A bucket with padding everywhere: after a plain tensor, between values and scales, and after scales."""
    tensors = {"a": noise(3), "q": noise(5, 7), "b": noise(3), "layers.0.weight": noise(130, 200).bfloat16()}
    forms = {"a": PLAIN, "q": FP8, "b": PLAIN, "layers.0.weight": FP8}
    return bucket_of(*(wire(name, x, forms[name]) for name, x in tensors.items())), tensors


def test_bytes_are_as_the_contract_says():
    bucket, tensors = mixed()
    data = encode_bucket(bucket, tensors, CPU).numpy().tobytes()
    codes, scales = oracle.quantize(tensors["q"].numpy())
    plain = tensors["a"].numpy().tobytes() + bytes(4)
    wanted = plain + codes.tobytes() + bytes(13) + scales.tobytes() + bytes(12) + plain
    codes, scales = oracle.quantize(tensors["layers.0.weight"].float().numpy())
    assert data == wanted + codes.tobytes() + scales.tobytes()


def test_memory_that_is_given_is_filled_padding_included():
    bucket, tensors = mixed()
    out = torch.full((bucket.wire_bytes,), 255, dtype=torch.uint8)
    assert encode_bucket(bucket, tensors, CPU, out) is out
    assert out.equal(encode_bucket(bucket, tensors, CPU))


def test_memory_of_another_size_is_refused():
    bucket, tensors = mixed()
    with pytest.raises(AssertionError, match="for a bucket of"):
        encode_bucket(bucket, tensors, CPU, torch.empty(16, dtype=torch.uint8))


def test_kept_fp8_is_values_and_scales_as_views():
    bucket, tensors = mixed()
    buffer = encode_bucket(bucket, tensors, CPU)
    decoded = dict(decode_bucket(bucket, buffer, torch.bfloat16, keep_fp8=True))
    assert list(decoded) == ["a", "q", "q_scale_inv", "b", "layers.0.weight", "layers.0.weight_scale_inv"]
    for name in ("q", "layers.0.weight"):
        codes, scales = oracle.quantize(tensors[name].float().numpy())
        values, inverse = decoded[name], decoded[f"{name}_scale_inv"]
        assert values.dtype == torch.float8_e4m3fn and inverse.dtype == torch.float32
        np.testing.assert_array_equal(values.view(torch.uint8).numpy(), codes)
        np.testing.assert_array_equal(inverse.numpy(), scales)
        assert values.untyped_storage().data_ptr() == inverse.untyped_storage().data_ptr() == buffer.data_ptr()
        assert values.data_ptr() % 16 == inverse.data_ptr() % 16 == 0


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


@pytest.mark.parametrize("place", [(0, 0), (129, 199)])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_tensor_that_is_not_finite_is_an_error_that_names_the_first(bad, place):
    names = ["layers.0.q", "layers.1.q", "layers.2.q"]
    tensors = {name: noise(130, 200) for name in names}
    for name in names[1:]:
        tensors[name][place] = bad
    bucket = bucket_of(*(wire(name, x, FP8) for name, x in tensors.items()))
    with pytest.raises(ValueError, match=r"^layers\.1\.q"):
        encode_bucket(bucket, tensors, CPU)
