"""Quantisation on CPU and its torch reference against a numpy oracle, byte for byte. Nothing is faked."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.weight_sync.layout import BLOCK_128, CHANNEL, TENSOR, Scaling
from services.weight_sync.quantize import dequantize, dequantize_reference, quantize, quantize_reference
from tests import weight_sync_oracles as oracle
from tests.scalings import SCALINGS, same_bits

SHAPES = [(1, 1), (1, 128), (128, 1), (3, 5), (127, 129), (128, 128), (129, 127), (256, 384), (300, 200), (1, 1000)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_equal_to_oracle(x: torch.Tensor, scaling: Scaling = BLOCK_128) -> None:
    """Both ways, and in both implementations."""
    block = scaling.block(x.shape)
    codes, expected_scales = oracle.quantize(x.float().numpy(), block, scaling.ue8m0)
    back = torch.from_numpy(oracle.dequantize(codes, expected_scales, block))
    for values, scales in (quantize(x, scaling=scaling), quantize_reference(x, scaling)):
        np.testing.assert_array_equal(scales.numpy().view(np.uint32), expected_scales.view(np.uint32))
        np.testing.assert_array_equal(values.view(torch.uint8).numpy(), codes)
        assert values.shape == x.shape and values.is_contiguous() and scales.is_contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        expected = back.to(dtype)
        assert same_bits(dequantize(values, scales, dtype, scaling), expected)
        assert same_bits(dequantize_reference(values, scales, dtype, scaling), expected)


def noise(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_noise_is_quantised_as_the_oracle_does(shape, dtype, scaling):
    assert_equal_to_oracle(noise(shape, dtype), scaling)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_every_finite_bfloat16(scaling):
    """In the order of their bits, so that the elements of a row, or of some blocks, are alike in size."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert_equal_to_oracle(
        torch.where(every.isfinite(), every, torch.zeros(1, dtype=torch.bfloat16)).view(512, 128), scaling
    )


@pytest.mark.parametrize("scaling", [BLOCK_128, CHANNEL, TENSOR], ids=str)
def test_every_code_is_decoded_under_scales_of_all_sizes(scaling):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(260, 1)
    codes = torch.where(codes.float().isfinite(), codes.float(), 0.0).to(torch.float8_e4m3fn)
    shape = quantize(codes.float(), scaling=scaling)[1].shape
    scales = torch.exp2(torch.linspace(-140, 110, shape.numel())).view(shape)
    scales.view(-1)[::2] *= -1
    assert same_bits(
        dequantize(codes, scales, torch.bfloat16, scaling), dequantize_reference(codes, scales, torch.bfloat16, scaling)
    )


def test_every_code_and_every_tie_between_codes():
    codes = oracle.E4M3_MAGNITUDES
    points = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2])
    row = np.concatenate([points, -points]).astype(np.float32)
    block = np.zeros((2, 384), np.float32)  # a maximum of 448 in each of the three blocks makes the scale exactly 1
    block[0, : len(row) // 2], block[1, : len(row) // 2] = row[: len(row) // 2], row[len(row) // 2 :]
    block[1, [383, 255, 127]] = 448
    assert_equal_to_oracle(torch.from_numpy(block))


@pytest.mark.parametrize(
    "factor", [1e-45, 1e-40, 1e-38, 1e-20, 1e-13, 1e-12, 1.0, 1e30, 1e38], ids=lambda factor: f"{factor:g}"
)
def test_extreme_magnitudes(factor):
    x = noise((130, 140), torch.float32) * factor
    x.clamp_(-3.4e38, 3.4e38)
    assert_equal_to_oracle(x)


def test_blocks_of_zeros_keep_the_sign_of_zero():
    x = torch.zeros(256, 256)
    x[:128, 128:] = -0.0
    x[200, 200] = 3.0
    assert_equal_to_oracle(x)
    values, scales = quantize(x)
    assert scales[0, 0] == np.float32(1e-12) / np.float32(448)
    back = dequantize(values, scales, torch.float32)
    assert back[x == 0].equal(x[x == 0]) and back.signbit().equal(x.signbit())


@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES[:2]),
    scaling=st.sampled_from(SCALINGS),
)
@settings(max_examples=60, deadline=None)
def test_random_shapes_and_ranges(rows, columns, exponent, seed, dtype, scaling):
    spread = noise((rows, columns), torch.float32, seed + 1) * 4
    x = (noise((rows, columns), torch.float32, seed) * torch.exp2(spread + exponent)).to(dtype)
    assert_equal_to_oracle(x, scaling)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_do_not_matter(dtype):
    x = noise((300, 600), dtype)
    for view in (x.T, x[::2, 1::3], x[:, 100:250]):
        assert_equal_to_oracle(view)
    values, scales = quantize(x)
    assert dequantize(values.T, scales.T.contiguous(), torch.float32).equal(dequantize(values, scales, torch.float32).T)


def test_the_input_is_left_alone():
    x = noise((256, 256), torch.float32)
    before = x.clone()
    quantize(x)
    assert x.equal(before)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_an_error_that_names_the_tensor(bad, dtype, scaling):
    x = noise((200, 200), dtype)
    x[199, 150] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.weight"):
        quantize(x, "layers.3.weight", scaling)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_fp8_that_is_not_finite_is_an_error_that_names_the_tensor(scaling):
    values, scales = quantize(noise((200, 200), torch.float32), scaling=scaling)
    broken = values.clone()
    broken.view(torch.uint8)[199, 150] = 0xFF
    infinite = scales.clone()
    infinite[-1, -1] = float("inf")
    for one, other in ((broken, scales), (values, infinite)):
        with pytest.raises(ValueError, match=r"layers\.3\.weight"):
            dequantize(one, other, torch.bfloat16, scaling, "layers.3.weight")


def test_scales_that_do_not_fit_are_an_error_that_names_the_tensor():
    values, scales = quantize(noise((200, 200), torch.float32))
    with pytest.raises(ValueError, match=r"layers\.3\.weight"):
        dequantize(values, scales[:1], torch.bfloat16, name="layers.3.weight")


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_second_round_trip_changes_nothing(scaling):
    """A scale of UE8M0 may become half of what it was, when the largest value is 224 times it; the values stay."""
    first = quantize(noise((300, 200), torch.bfloat16), scaling=scaling)
    decoded = dequantize(*first, torch.bfloat16, scaling)
    second = quantize(decoded, scaling=scaling)
    assert dequantize(*second, torch.bfloat16, scaling).equal(decoded)
    if not scaling.ue8m0:
        assert second[0].view(torch.uint8).equal(first[0].view(torch.uint8)) and second[1].equal(first[1])


@pytest.mark.parametrize("shape", [(256, 256), (200, 300)])
def test_error_bound(shape):
    x = noise(shape, torch.float32) * torch.exp2(noise(shape, torch.float32, 1) * 5)
    values, scales = quantize(x)
    spread = torch.repeat_interleave(torch.repeat_interleave(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]
    bound = torch.maximum(x.abs() * 2**-4, spread * 2**-10) * (1 + 2**-20)  # room for the rounding of float32 itself
    assert ((dequantize(values, scales, torch.float32) - x).abs() <= bound).all()


@pytest.mark.parametrize("eighths", range(8, 17))
def test_division_of_the_kernel_where_it_is_hardest(eighths):
    """The arithmetic of `quantize_triton._divide`, in exact numbers, at every quotient whose code it could miss.

    Divisors have their 24-bit significand near a multiple of 2**20, quotients lie at a float32 rounding boundary beside
    the middle between two codes; all else follows by the powers of two.
    """
    rn = oracle.to_float32
    significands = [s for s in range(eighths * 2**20 - 8, eighths * 2**20 + 9) if 2**23 <= s < 2**24]
    for divisor in (Fraction(s, 2**23) for s in significands):
        inverse = rn(1 / divisor)
        for boundary in (Fraction(m, 16) + Fraction(side, 2**24) for m in range(16, 32) for side in (-1, 1)):
            ulp = Fraction(1, 2**23 if boundary * divisor < 2 else 2**22)
            nearest = round(boundary * divisor / ulp)
            for x in (i * ulp for i in range(nearest - 1, nearest + 2)):
                quotient = rn(x * inverse)
                excess = rn(quotient * divisor - x)
                assert rn(quotient - excess * inverse) == rn(x / divisor), (x, divisor)
