"""The digest against a plain-integer oracle, and its laws. Nothing is faked."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from services.weight_sync import digest_torch
from services.weight_sync.digest import Digest, tensor_key, total
from services.weight_sync.digest_torch import STRIPE_WORDS, Run, digest_bucket, digest_bytes, runs
from services.weight_sync.records import WireBucket, WireFormat, WireTensor
from tests import weight_sync_oracles as oracle


def some_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def digest_of(tensors: dict[str, np.ndarray]) -> Digest:
    return total(digest_bytes(name, torch.from_numpy(data)) for name, data in tensors.items())


@pytest.mark.parametrize("size", [8, 16, 4096])
def test_equals_the_oracle(size):
    tensors = {"a": some_bytes(size), "model.b": some_bytes(64, 1)}
    assert str(digest_of(tensors)) == oracle.digest({name: data.tobytes() for name, data in tensors.items()})


def test_words_with_all_bits_set_equal_the_oracle():
    data = np.full(64, 255, np.uint8)
    assert str(digest_of({"a": data})) == oracle.digest({"a": data.tobytes()})


def test_whole_stripes_a_rest_and_chunks_equal_the_oracle(monkeypatch):
    data = {"a": some_bytes(8 * (3 * STRIPE_WORDS + 5))}
    whole = digest_of(data)
    assert str(whole) == oracle.digest({"a": data["a"].tobytes()})
    monkeypatch.setattr(digest_torch, "CHUNK_STRIPES", 2)
    assert digest_of(data) == whole


def test_a_bucket_is_the_sum_of_its_padded_tensors():
    tensors = tuple(WireTensor(f"t{n}", (n,), "bfloat16", WireFormat.PLAIN, 2 * n) for n in (1, 8, 13))
    bucket = WireBucket(0, tensors, 16 + 16 + 32)
    data = some_bytes(64)
    parts = {"t1": data[:16], "t8": data[16:32], "t13": data[32:]}
    assert digest_bucket(bucket, torch.from_numpy(data)) == digest_of(parts)
    assert runs(bucket) == [
        Run(tensor_key(f"t{n}"), first, words) for n, first, words in ((1, 0, 2), (8, 2, 2), (13, 4, 4))
    ]


def test_parts_in_any_order_add_up_to_the_whole():
    tensors = {f"t{i}": some_bytes(40 * (i + 1), i) for i in range(6)}
    whole = digest_of(tensors)
    names = list(tensors)
    random.Random(0).shuffle(names)
    parts = []
    for name in names:
        data = torch.from_numpy(tensors[name])
        parts += [digest_bytes(name, data[24:], first_word=3), digest_bytes(name, data[:24])]
    assert total(parts) == whole


@pytest.mark.parametrize("first_word", [1, STRIPE_WORDS - 1, STRIPE_WORDS, STRIPE_WORDS + 1])
def test_parts_may_begin_anywhere(first_word):
    data = torch.from_numpy(some_bytes(8 * 3 * STRIPE_WORDS))
    parts = [digest_bytes("a", data[: 8 * first_word]), digest_bytes("a", data[8 * first_word :], first_word)]
    assert total(parts) == digest_bytes("a", data)


def test_every_single_bit_counts():
    data = some_bytes(64)
    seen = {digest_of({"a": data})}
    for bit in range(64 * 8):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << (bit % 8)
        seen.add(digest_of({"a": flipped}))
    assert len(seen) == 64 * 8 + 1
    assert len({digest.low for digest in seen}) == len({digest.high for digest in seen}) == len(seen)


def test_swapped_words_swapped_tensors_and_names_count():
    data = some_bytes(64)
    swapped = data.copy()
    swapped[:8], swapped[8:16] = data[8:16], data[:8]
    a, b = some_bytes(16, 1), some_bytes(16, 2)
    assert digest_of({"a": data}) != digest_of({"a": swapped})
    assert digest_of({"a": data}) != digest_of({"b": data})
    assert digest_of({"a": a, "b": b}) != digest_of({"a": b, "b": a})


@pytest.mark.parametrize("fill", [0, 255])
def test_every_word_counts_and_so_does_its_place(fill):
    """A word that is dropped (zeroed) or appears in the place of another changes both lanes, in every place."""
    words = torch.full((2 * STRIPE_WORDS,), -1 if fill else 0)
    seen = {digest_bytes("a", words.view(torch.uint8))}
    for place in range(len(words)):
        changed = words.clone()
        changed[place] = 0 if fill else 12345
        seen.add(digest_bytes("a", changed.view(torch.uint8)))
    assert len({digest.low for digest in seen}) == len({digest.high for digest in seen}) == len(words) + 1


def test_stripes_exchanged_count_even_if_one_is_the_other_with_words_exchanged():
    """Keys that are sums of a number of the position and one of the stripe would not see it."""
    words = torch.from_numpy(some_bytes(8 * STRIPE_WORDS)).view(torch.int64).repeat(2, 1)
    words[1, :2] = words[0, :2].flip(0)
    before, after = (digest_bytes("a", each.flatten().view(torch.uint8)) for each in (words, words.flip(0)))
    assert before.low != after.low and before.high != after.high


def test_lanes_wrap():
    most = (1 << 64) - 1
    assert Digest(most, 1) + Digest(2, most) == Digest(1, 0)


def test_hexadecimal_and_back():
    digest = Digest(0x1234, (1 << 64) - 1)
    assert str(digest) == "f" * 16 + "0" * 12 + "1234"
    assert Digest.parse(str(digest)) == digest
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        Digest.parse("abc")
