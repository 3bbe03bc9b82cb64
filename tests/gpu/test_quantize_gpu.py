"""Quantisation, decoding and the bytes of a bucket on CUDA against the same on the CPU, byte for byte. Needs CUDA."""

from __future__ import annotations

import pytest
import torch

from services.weight_sync.layout import (
    BLOCK_128,
    CHANNEL,
    TENSOR,
    Scaling,
    encoded_bytes,
    padded,
    quantised_bytes,
    scales_offset,
)
from services.weight_sync.quantize import (
    Encoded,
    Placement,
    dequantize,
    dequantize_into,
    dequantize_reference,
    quantize,
    quantize_into,
    quantize_reference,
    values_and_scales,
)
from services.weight_sync.records import WireBucket, WireFormat, WireTensor
from services.weight_sync.wire import decode_bucket, encode_bucket
from tests.scalings import SCALINGS, same_bits

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
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def noise(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_same_bytes(x: torch.Tensor, scaling: Scaling = BLOCK_128) -> None:
    """Both ways. `x` lies on CUDA; the reference runs on a copy in main memory."""
    values, scales = quantize(x, scaling=scaling)
    assert_equals_reference(x, values, scales, scaling)
    assert values.shape == x.shape and values.is_contiguous() and scales.is_contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        expected = dequantize_reference(values.cpu(), scales.cpu(), dtype, scaling)
        assert same_bits(dequantize(values, scales, dtype, scaling).cpu(), expected)


def assert_equals_reference(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, scaling: Scaling = BLOCK_128
) -> None:
    expected_values, expected_scales = quantize_reference(x.cpu(), scaling)
    assert scales.cpu().view(torch.int32).equal(expected_scales.view(torch.int32))
    found, expected = values.cpu().view(torch.uint8), expected_values.view(torch.uint8)
    if not found.equal(expected):
        differ = (found != expected).nonzero()
        row, column = differ[0].tolist()
        pytest.fail(
            f"{len(differ)} bytes differ, first at [{row}, {column}]: x = {x[row, column].item()!r}, "
            f"kernel {found[row, column].item():#04x}, reference {expected[row, column].item():#04x}"
        )


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_noise(shape, dtype, scaling):
    assert_same_bytes(noise(shape, dtype).cuda(), scaling)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_wide_ranges(seed, scaling):
    exponents = noise((513, 640), torch.float32, seed + 100) * 20
    assert_same_bytes((noise((513, 640), torch.float32, seed) * torch.exp2(exponents)).cuda(), scaling)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_every_finite_bfloat16(scaling):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert_same_bytes(every[every.isfinite()].view(510, 128).cuda(), scaling)


@pytest.mark.parametrize("scaling", [BLOCK_128, CHANNEL, TENSOR], ids=str)
def test_every_code_under_scales_of_all_sizes(scaling):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().repeat(260, 1)
    codes = torch.where(codes.isfinite(), codes, 0.0).to(torch.float8_e4m3fn)
    shape = quantize(codes.float(), scaling=scaling)[1].shape
    scales = torch.exp2(torch.linspace(-140, 110, shape.numel())).view(shape)
    expected = dequantize_reference(codes, scales, torch.bfloat16, scaling)
    assert same_bits(dequantize(codes.cuda(), scales.cuda(), torch.bfloat16, scaling).cpu(), expected)


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


@pytest.mark.parametrize("seed", range(16))
def test_every_bfloat16_under_many_scales(seed):
    """Each magnitude up to that of a block's first element, which is drawn from all float32 exponents."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)
    top = abs(noise((1, 1), torch.float32, seed).item()) * 2.0 ** (16 * seed - 120)
    x = torch.where(every.isfinite() & (every.float().abs() <= top), every.float(), torch.zeros(1))
    x[::128, 0] = top
    assert_same_bytes(x.cuda())
    assert_same_bytes(x.bfloat16().cuda())


def test_hardest_quotients():
    """The quotients next to a float32 rounding boundary beside the middle of two codes, under every scale that can
    bring one nearest: see `quantize_triton._divide`."""
    scales = ((torch.arange(8, 17)[:, None] << 20) + torch.arange(-8, 9)).flatten().double() * 2.0**-23
    tops = (scales * 448).float()
    scales, tops = (each[(tops / 448).double() == scales] for each in (scales, tops))
    middles = torch.arange(16, 32).double() / 16
    boundaries = torch.cat([middles - 2.0**-24, middles + 2.0**-24])
    quotients = (boundaries[:, None] * 2.0 ** torch.arange(-11, 9).double()).flatten()
    nearest = (scales[:, None] * quotients).float()
    beside = [torch.nextafter(nearest, torch.full_like(nearest, end)) for end in (0.0, 1e9)]
    points = torch.cat([nearest, *beside], 1)
    points = torch.cat([points, -points, tops[:, None]], 1).clamp(-tops[:, None], tops[:, None])
    x = torch.zeros(len(scales), 128 * 128)
    x[:, : points.shape[1]] = points
    assert len(scales) > 50
    assert_same_bytes(x.view(-1, 128).cuda())


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_with_strides(dtype, scaling):
    x = noise((600, 900), dtype).cuda()
    for view in (x.T, x[::2, 1::3], x[:, 100:250], x[37:, 11:], x[::3].T):
        assert_same_bytes(view, scaling)


def test_a_transposed_view_is_decoded():
    values, scales = quantize(noise((600, 900), torch.bfloat16).cuda())
    decoded = dequantize(values.T, scales.T.contiguous(), torch.bfloat16)
    assert decoded.equal(dequantize(values, scales, torch.bfloat16).T)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (199, 299), (130, 140)])
def test_what_is_not_finite_is_an_error(bad, place, scaling):
    x = noise((200, 300), torch.float32)
    x[place] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.weight"):
        quantize(x.cuda(), "layers.3.weight", scaling)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_fp8_that_is_not_finite_is_an_error(scaling):
    values, scales = quantize(noise((200, 300), torch.float32).cuda(), scaling=scaling)
    broken, infinite = values.clone(), scales.clone()
    broken.view(torch.uint8)[199, 150] = 0xFF
    infinite[-1, -1] = float("inf")
    for one, other in ((broken, scales), (values, infinite)):
        with pytest.raises(ValueError, match=r"layers\.3\.weight"):
            dequantize(one, other, torch.bfloat16, scaling, "layers.3.weight")


def test_blocks_that_no_kernel_is_for_are_refused():
    with pytest.raises(ValueError, match="100x128"):
        quantize(noise((200, 300), torch.float32).cuda(), scaling=Scaling(100, 128))


def test_offsets_beyond_two_to_the_31():
    x = torch.zeros(1 << 15, (1 << 16) + 1, dtype=torch.bfloat16, device="cuda")
    x[-1] = noise((1, x.shape[1]), torch.bfloat16).cuda()
    values, scales = quantize(x)
    expected_values, expected_scales = quantize_reference(x[-128:].cpu())
    assert values[-128:].cpu().view(torch.uint8).equal(expected_values.view(torch.uint8))
    assert scales[-1:].cpu().equal(expected_scales)


@pytest.mark.parametrize("warps", [8, 16])
def test_warps_do_not_matter(warps):
    from services.weight_sync.quantize_cuda import quantize_cuda

    x = noise((300, 1008), torch.bfloat16).cuda()
    data = torch.empty(quantised_bytes(x.shape), dtype=torch.uint8, device=CUDA)
    assert quantize_cuda(data, [Placement("x", x, 0)], BLOCK_128, warps) == [True]
    assert_equals_reference(x, *values_and_scales(data, x.shape))


@pytest.mark.parametrize("shape", [(130, 250), (256, 384)])
@pytest.mark.parametrize("start", [0, 48, 1 << 20])
def test_into_a_slice_of_memory_and_nowhere_else(start, shape):
    x = noise(shape, torch.bfloat16).cuda()
    memory = torch.full((32 + start + quantised_bytes(shape) + 32,), 255, dtype=torch.uint8, device=CUDA)
    quantize_into(memory[32:], [Placement("x", x, start)])
    encoded = memory[32 + start : -32]
    assert_equals_reference(x, *values_and_scales(encoded, shape))
    assert (memory[: 32 + start] == 255).all() and (memory[-32:] == 255).all()
    assert (encoded[x.numel() : scales_offset(shape)] == 255).all()


def many(scaling: Scaling = BLOCK_128) -> list[Placement]:
    """More matrices than a launch takes, of every kind, some of them empty."""
    shapes = [(1 + 37 * i % 300, 16 * (1 + i % 20) + (i % 5 == 0)) for i in range(700)] + [(0, 16), (3, 0)]
    matrices, start = [], 0
    for i, shape in enumerate(shapes):
        matrices.append(Placement(f"t{i}", noise(shape, DTYPES[i % 3 if i % 2 else 1], i).cuda(), start))
        start += padded(quantised_bytes(shape, scaling))
    return matrices


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_many_matrices_at_once(scaling):
    matrices = many(scaling)
    buffer = torch.empty(matrices[-1].start + 16, dtype=torch.uint8, device=CUDA)
    quantize_into(buffer, matrices, scaling)
    encoded = []
    for one in matrices:
        values, scales = values_and_scales(buffer[one.start :], one.x.shape, scaling)
        assert_equals_reference(one.x, values, scales, scaling)
        out = torch.empty(one.x.shape, dtype=[torch.bfloat16, torch.float32][len(encoded) % 2], device=CUDA)
        encoded.append(Encoded(one.name, values, scales, out))
    dequantize_into(encoded, scaling)
    for one in encoded:
        expected = dequantize_reference(one.values.cpu(), one.scales.cpu(), one.out.dtype, scaling)
        assert same_bits(one.out.cpu(), expected)


def test_the_first_of_many_that_is_not_finite_is_named():
    matrices = many()
    buffer = torch.empty(matrices[-1].start + 16, dtype=torch.uint8, device=CUDA)
    for i in (650, 333, 600):
        matrices[i].x[-1, -1] = float("nan")
    with pytest.raises(ValueError, match=r"^t333 has"):
        quantize_into(buffer, matrices)


def mixed() -> tuple[WireBucket, dict[str, torch.Tensor]]:
    """A bucket of plain and quantised tensors, with padding everywhere."""
    tensors = {
        "norm": noise((1, 77), torch.bfloat16)[0],
        "odd": noise((5, 7), torch.float32),
        "wide": noise((130, 1000), torch.bfloat16),
        "bias": noise((1, 3), torch.float32)[0],
        "turned": noise((640, 384), torch.bfloat16).T,
        "rounded": noise((9, 9), torch.float32),
    }
    plain = {"norm": "bfloat16", "bias": "float32", "rounded": "bfloat16"}
    wire = []
    for name, x in tensors.items():
        form = WireFormat.PLAIN if name in plain else WireFormat.FP8_BLOCK_128
        dtype = plain.get(name, str(x.dtype).removeprefix("torch."))
        wire.append(WireTensor(name, tuple(x.shape), dtype, form, encoded_bytes(x.shape, dtype, form)))
    return WireBucket(0, tuple(wire), sum(padded(tensor.wire_bytes) for tensor in wire)), tensors


def test_a_bucket_is_encoded_to_the_bytes_of_the_cpu():
    bucket, tensors = mixed()
    expected = encode_bucket(bucket, tensors, CPU)
    on_device = {name: x.cuda() for name, x in tensors.items()}
    assert encode_bucket(bucket, on_device, CUDA).cpu().equal(expected)
    memory = torch.full((bucket.wire_bytes + 64,), 255, dtype=torch.uint8, device=CUDA)
    out = memory[32 : 32 + bucket.wire_bytes]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert encode_bucket(bucket, on_device, CUDA, out).cpu().equal(expected)
    assert (memory[:32] == 255).all() and (memory[-32:] == 255).all()


@pytest.mark.parametrize("keep_fp8", [False, True])
def test_a_bucket_is_decoded_as_on_the_cpu(keep_fp8):
    bucket, tensors = mixed()
    buffer = encode_bucket(bucket, tensors, CPU)
    expected = list(decode_bucket(bucket, buffer, torch.bfloat16, keep_fp8))
    decoded = list(decode_bucket(bucket, buffer.cuda(), torch.bfloat16, keep_fp8))
    assert [name for name, _ in decoded] == [name for name, _ in expected]
    for (name, found), (_, wanted) in zip(decoded, expected, strict=True):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, name
        assert found.cpu().contiguous().view(torch.uint8).equal(wanted.contiguous().view(torch.uint8)), name


def test_a_bucket_that_is_not_finite_names_the_first_such_tensor():
    bucket, tensors = mixed()
    on_device = {name: x.cuda() for name, x in tensors.items()}
    for name in ("wide", "turned"):
        on_device[name][100, 300] = float("nan")
    with pytest.raises(ValueError, match=r"^wide has elements that are not finite"):
        encode_bucket(bucket, on_device, CUDA)
