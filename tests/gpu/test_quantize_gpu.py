"""The Triton kernel of block quantisation against the torch reference, byte for byte. Needs CUDA."""

from __future__ import annotations

import pytest
import torch

from services.weight_sync.quantize import quantize, quantize_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SHAPES = [
    (1, 1),
    (1, 128),
    (128, 1),
    (3, 5),
    (127, 129),
    (128, 128),
    (129, 127),
    (255, 1000),
    (300, 200),
    (1024, 2048),
    (2112, 7168),
    (4097, 4095),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def noise(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_bytes(x: torch.Tensor) -> None:
    """`x` lies on CUDA; the reference runs on a copy in main memory."""
    values, scales = quantize(x)
    expected_values, expected_scales = quantize_reference(x.cpu())
    assert scales.cpu().view(torch.int32).equal(expected_scales.view(torch.int32))
    found, expected = values.cpu().view(torch.uint8), expected_values.view(torch.uint8)
    if not found.equal(expected):
        differ = (found != expected).nonzero()
        row, column = differ[0].tolist()
        pytest.fail(
            f"{len(differ)} bytes differ, first at [{row}, {column}]: x = {x[row, column].item()!r}, "
            f"kernel {found[row, column].item():#04x}, reference {expected[row, column].item():#04x}"
        )
    assert values.shape == x.shape and values.is_contiguous() and scales.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_noise(shape, dtype):
    assert_same_bytes(noise(shape, dtype).cuda())


@pytest.mark.parametrize("seed", range(8))
def test_wide_ranges(seed):
    exponents = noise((513, 640), torch.float32, seed + 100) * 20
    assert_same_bytes((noise((513, 640), torch.float32, seed) * torch.exp2(exponents)).cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e-45, 1e-40, 1e-38, 1e-20, 1e-13, 1e-12, 1e20, 1e38])
def test_extreme_magnitudes(factor, dtype):
    x = (noise((200, 300), torch.float32) * factor).clamp(-3.3e38, 3.3e38)
    assert_same_bytes(x.to(dtype).cuda())


def test_blocks_of_zeros_and_signed_zeros():
    x = torch.zeros(384, 256)
    x[:128, 128:] = -0.0
    x[200, 200] = 3.0
    x[300, 10] = 1e-44
    assert_same_bytes(x.cuda())


def test_every_tie_between_codes():
    """Quotients that lie exactly between two codes, under a scale of exactly 1."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    x = torch.zeros(128, 256)
    x[0, : len(points)], x[1, : len(points)] = points, -points
    x[2, [127, 255]] = 448.0
    assert_same_bytes(x.cuda())


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_with_strides(dtype):
    x = noise((600, 900), dtype).cuda()
    for view in (x.T, x[::2, 1::3], x[:, 100:250], x[37:, 11:], x[::3].T):
        assert_same_bytes(view)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (199, 299), (130, 140)])
def test_what_is_not_finite_is_an_error(bad, place):
    x = noise((200, 300), torch.float32)
    x[place] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.weight"):
        quantize(x.cuda(), "layers.3.weight")


def test_offsets_beyond_two_to_the_31():
    x = torch.zeros(1 << 15, (1 << 16) + 1, dtype=torch.bfloat16, device="cuda")
    x[-1] = noise((1, x.shape[1]), torch.bfloat16).cuda()
    values, scales = quantize(x)
    expected_values, expected_scales = quantize_reference(x[-128:].cpu())
    assert values[-128:].cpu().view(torch.uint8).equal(expected_values.view(torch.uint8))
    assert scales[-1:].cpu().equal(expected_scales)
