"""The digest against a plain-integer oracle, and its laws. Nothing is faked."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from services.weight_sync import fingerprint
from services.weight_sync.digest import Digest, total
from services.weight_sync.fingerprint import digest_bytes
from tests import weight_sync_oracles as oracle


def some_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def digest_of(tensors: dict[str, np.ndarray]) -> Digest:
    return total(digest_bytes(name, torch.from_numpy(data)) for name, data in tensors.items())


@pytest.mark.parametrize("size", [4, 16, 4096])
def test_equals_the_oracle(size):
    tensors = {"a": some_bytes(size), "model.b": some_bytes(64, 1)}
    assert str(digest_of(tensors)) == oracle.digest({name: data.tobytes() for name, data in tensors.items()})


def test_words_with_all_bits_set_equal_the_oracle():
    data = np.full(64, 255, np.uint8)
    assert str(digest_of({"a": data})) == oracle.digest({"a": data.tobytes()})


def test_chunks_do_not_matter(monkeypatch):
    data = {"a": some_bytes(4000)}
    whole = digest_of(data)
    monkeypatch.setattr(fingerprint, "CHUNK_WORDS", 7)
    assert digest_of(data) == whole


def test_parts_in_any_order_add_up_to_the_whole():
    tensors = {f"t{i}": some_bytes(40 * (i + 1), i) for i in range(6)}
    whole = digest_of(tensors)
    names = list(tensors)
    random.Random(0).shuffle(names)
    parts = []
    for name in names:
        data = torch.from_numpy(tensors[name])
        parts += [digest_bytes(name, data[20:], first_word=5), digest_bytes(name, data[:20])]
    assert total(parts) == whole


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
    swapped[:4], swapped[4:8] = data[4:8], data[:4]
    a, b = some_bytes(16, 1), some_bytes(16, 2)
    assert digest_of({"a": data}) != digest_of({"a": swapped})
    assert digest_of({"a": data}) != digest_of({"b": data})
    assert digest_of({"a": a, "b": b}) != digest_of({"a": b, "b": a})


def test_lanes_wrap():
    most = (1 << 64) - 1
    assert Digest(most, 1) + Digest(2, most) == Digest(1, 0)


def test_hexadecimal_and_back():
    digest = Digest(0x1234, (1 << 64) - 1)
    assert str(digest) == "f" * 16 + "0" * 12 + "1234"
    assert Digest.parse(str(digest)) == digest
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        Digest.parse("abc")
