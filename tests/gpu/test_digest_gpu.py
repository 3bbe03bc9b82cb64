"""The Triton kernel of the digest against the torch form on the CPU. Needs CUDA."""

from __future__ import annotations

import pytest
import torch

from services.weight_sync.digest import Digest
from services.weight_sync.digest_torch import STRIPE_WORDS, digest_bucket, digest_bytes
from services.weight_sync.layout import padded
from services.weight_sync.records import WireBucket, WireFormat, WireTensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def bucket_of(*sizes: int) -> WireBucket:
    """Plain tensors of so many bfloat16 elements."""
    tensors = tuple(WireTensor(f"t{i}", (n,), "bfloat16", WireFormat.PLAIN, 2 * n) for i, n in enumerate(sizes))
    return WireBucket(0, tensors, sum(padded(tensor.wire_bytes) for tensor in tensors))


def some_bytes(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator)


def assert_same_digest(*sizes: int) -> None:
    bucket = bucket_of(*sizes)
    buffer = some_bytes(bucket.wire_bytes)
    assert digest_bucket(bucket, buffer) == digest_bucket(bucket, buffer.cpu())


@pytest.mark.parametrize("words", [2, 4, *(n * STRIPE_WORDS + i for n in (1, 2, 16) for i in (-2, 0, 2)), 100_002])
def test_one_tensor(words):
    assert_same_digest(4 * words)


def test_ragged_sizes_with_padding():
    assert_same_digest(1, 8, 9, 70_001, 3, 65_536, 65_537, 40, 1_000_003)


def test_many_tensors():
    assert_same_digest(*(1 + 37 * i % 5000 for i in range(3000)))


def test_nothing():
    bucket = bucket_of()
    assert digest_bucket(bucket, some_bytes(0)) == Digest()


def test_words_with_all_bits_set():
    bucket = bucket_of(4000)
    buffer = torch.full((bucket.wire_bytes,), 255, dtype=torch.uint8, device="cuda")
    assert digest_bucket(bucket, buffer) == digest_bucket(bucket, buffer.cpu())


def test_more_than_two_to_the_31_bytes():
    """Only what is changed, far behind, goes through the CPU: before + changed part == after + part before."""
    bucket = bucket_of(5, (1 << 30) + (1 << 20), 13)
    buffer, part = some_bytes(bucket.wire_bytes), slice((1 << 31) + 1024, (1 << 31) + 300_000)
    first_word = (part.start - 16) // 8
    before, old = digest_bucket(bucket, buffer), digest_bytes("t1", buffer[part].cpu(), first_word)
    buffer[part] = some_bytes(part.stop - part.start, 1)
    after, new = digest_bucket(bucket, buffer), digest_bytes("t1", buffer[part].cpu(), first_word)
    assert before != after and before + new == after + old


def test_a_slice_of_memory_on_another_stream():
    bucket = bucket_of(100, 20_000)
    memory = some_bytes(bucket.wire_bytes + 64)
    expected = digest_bucket(bucket, memory.cpu()[48 : 48 + bucket.wire_bytes])
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # some 25 ms: what is put on the stream next must be waited for
        moved = memory.clone()
        assert digest_bucket(bucket, moved[48 : 48 + bucket.wire_bytes]) == expected


def test_every_single_bit_counts():
    bucket = bucket_of(32)
    data = some_bytes(64)
    seen = {digest_bucket(bucket, data)}
    for bit in range(64 * 8):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << (bit % 8)
        seen.add(digest_bucket(bucket, flipped))
    assert len(seen) == 64 * 8 + 1


def test_every_word_and_its_place_count():
    bucket = bucket_of(4 * 2 * STRIPE_WORDS)
    data = torch.zeros(2 * STRIPE_WORDS, dtype=torch.int64, device="cuda")
    seen = {digest_bucket(bucket, data.view(torch.uint8))}
    for place in range(0, len(data), 3):
        changed = data.clone()
        changed[place] = 12345
        seen.add(digest_bucket(bucket, changed.view(torch.uint8)))
    assert len(seen) == 1 + len(range(0, len(data), 3))


def test_another_layout_of_the_same_bytes_is_another_digest():
    data = some_bytes(1 << 16)
    buckets = [bucket_of(1 << 15), bucket_of(1 << 14, 1 << 14), bucket_of(1 << 13, 3 << 13)]
    assert len({digest_bucket(bucket, data) for bucket in buckets + buckets}) == 3


@pytest.mark.parametrize("warps", [2, 8])
def test_warps_do_not_matter(warps):
    from services.weight_sync.digest_triton import digest_cuda

    bucket = bucket_of(1, 70_001, 8)
    buffer = some_bytes(bucket.wire_bytes)
    assert digest_cuda(bucket, buffer, warps) == digest_bucket(bucket, buffer)
