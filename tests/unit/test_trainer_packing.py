"""Packing of micro-batches, and how attention groups what is packed. Nothing is faked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.trainer.attention import CoreAttention, causal_options, make_segments, rotate, should_pad, split_heads
from services.trainer.batch import Batch, MicroBatch, Row, Sample
from services.trainer.context import ContextRank
from services.trainer.packing import Pack, make_pack

CPU = torch.device("cpu")


def make_batch(rows: list[Row], rollouts: tuple[int, ...], *micro_batches: MicroBatch) -> Batch:
    return Batch(0, "", tuple(rows), rollouts, micro_batches)


def test_a_pack_by_hand() -> None:
    samples = [
        Sample((5, 6, 7), (8, 9), (-0.1, -0.2), (1, 0)),
        Sample((1,), (2, 3, 4), (-0.3, -0.4, -0.5), (0, 1, 1)),
    ]
    batch = make_batch([Row(0.5, 1), Row(-2.0, 4)], (8,), MicroBatch(0, (1, 0)))
    pack = make_pack(batch, batch.micro_batches[0], samples, CPU)
    assert pack.tokens.tolist() == [[1, 2, 3, 5, 6, 7, 8]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert pack.segments.cu_seqlens_q.tolist() == [0, 3, 7]
    assert pack.places.tolist() == [0, 1, 2, 5, 6]
    assert pack.targets.tolist() == [2, 3, 4, 8, 9]
    assert pack.mask.tolist() == [0, 1, 1, 1, 0]
    assert pack.weights.tolist() == [0, 1 / 32, 1 / 32, 1 / 8, 0]
    assert pack.advantages.tolist() == [-2, -2, -2, 0.5, 0.5]
    assert pack.rollout_log_probs.tolist() == pytest.approx([-0.3, -0.4, -0.5, -0.1, -0.2])


def test_each_optimizer_step_averages_over_its_own_rollouts() -> None:
    samples = [Sample((1,), (2,), (0.0,), (1,)) for _ in range(3)]
    batch = make_batch([Row(1.0, 1)] * 3, (1, 2), MicroBatch(0, (0,)), MicroBatch(1, (1, 2)))
    packs = [make_pack(batch, one, samples, CPU) for one in batch.micro_batches]
    assert [pack.weights.tolist() for pack in packs] == [[1.0], [0.5, 0.5]]


def test_a_sample_without_response_has_no_targets() -> None:
    samples = [Sample((1, 2), (), (), ()), Sample((3,), (4,), (-1.0,), (1,))]
    batch = make_batch([Row(1.0, 1), Row(1.0, 1)], (2,), MicroBatch(0, (0, 1)))
    pack = make_pack(batch, batch.micro_batches[0], samples, CPU)
    assert (pack.tokens.tolist(), pack.places.tolist(), pack.targets.tolist()) == ([[1, 2, 3]], [2], [4])
    alone = make_batch([Row(1.0, 1)], (1,), MicroBatch(0, (0,)))
    assert make_pack(alone, alone.micro_batches[0], samples, CPU).targets.shape == (0,)


def test_a_rank_without_rows_has_a_pack_that_nothing_looks_at() -> None:
    batch = make_batch([Row(1.0, 1)], (1,), MicroBatch(0, ()))
    whole = make_pack(batch, batch.micro_batches[0], [], CPU, multiple=2)
    assert (whole.tokens.tolist(), whole.segments.lengths) == ([[0, 0]], (2,))
    parts = [make_pack(batch, batch.micro_batches[0], [], CPU, 2, ContextRank(rank, 3)) for rank in range(3)]
    assert [(one.tokens.tolist(), one.segments.lengths) for one in parts] == [([[0] * 4], (2, 2))] * 3
    for pack in (whole, *parts):
        assert [len(one) for one in (pack.places, pack.targets, pack.weights)] == [0, 0, 0]


def reduce(packs: list[Pack], values: dict[int, float]) -> float:
    """Sum of a value of each target, with the packs' weights."""
    return sum(float(w) * values[int(t)] for pack in packs for w, t in zip(pack.weights, pack.targets, strict=True))


def test_a_mean_does_not_depend_on_how_a_step_is_cut() -> None:
    draw = random.Random(3)
    target = iter(range(10_000))
    samples, rows = [], []
    for _ in range(12):
        n = draw.randint(1, 9)
        mask = tuple(draw.randint(0, 1) for _ in range(n))
        samples.append(Sample((0,) * draw.randint(1, 5), tuple(next(target) for _ in range(n)), (0.0,) * n, mask))
        rows.append(Row(0.0, max(1, sum(mask))))
    values = {t: draw.gauss(0, 1) for one in samples for t in one.response}
    means = [
        sum(m * values[t] for m, t in zip(one.loss_mask, one.response, strict=True)) / max(1, sum(one.loss_mask))
        for one in samples
    ]
    for cut in ([12], [1] * 12, [5, 4, 3]):
        order, micro_batches = list(range(12)), []
        draw.shuffle(order)
        for size in cut:
            micro_batches.append(MicroBatch(0, tuple(order[:size])))
            order = order[size:]
        batch = make_batch(rows, (12,), *micro_batches)
        packs = [make_pack(batch, one, samples, CPU) for one in micro_batches]
        assert reduce(packs, values) == pytest.approx(sum(means) / 12, abs=1e-6)


def test_padding_is_for_short_segments_of_similar_length() -> None:
    assert should_pad((50, 60, 70))
    assert should_pad((30,))
    assert not should_pad((2000, 2000))
    assert not should_pad((10,) * 50 + (900,))


@pytest.mark.parametrize("lengths", [(3, 7, 1, 5), (1,), (1,) * 40 + (300,)])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_attention_stays_inside_segments(lengths: tuple[int, ...], key_heads: int) -> None:
    draw = torch.Generator().manual_seed(1)
    total = sum(lengths)
    q, k, v = (torch.randn(total, n, 8, generator=draw) for n in (4, key_heads, key_heads))
    attention = CoreAttention.__new__(CoreAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = None
    found = attention(q, k, v, packed_seq_params=make_segments(lengths, CPU))
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([causal_attention(*part) for part in parts])
    assert found.shape == (total, 32)
    assert (found - expected).abs().max() < 1e-5


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By the definition, head by head."""
    heads = []
    for head in range(q.shape[1]):
        mine = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, mine].T / q.shape[2] ** 0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        heads.append(F.softmax(scores.masked_fill(later, -torch.inf), -1) @ v[:, mine])
    return torch.cat(heads, -1)


def test_causal_options_of_every_torch() -> None:
    """Parameters as in torch 2.10, 2.11 and 2.13."""
    common = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert causal_options([*common, "is_causal", "return_aux"]) == {"is_causal": True}
    assert causal_options([*common, "return_aux", "scale", "window_size"]) == {"window_size": (-1, 0)}
    newest = causal_options([*common, "return_aux", "scale", "window_size", "enable_gqa", "seqused_k"])
    assert newest == {"window_size": (-1, 0), "enable_gqa": True}


def test_heads_are_split_by_group() -> None:
    """2 groups of 2 queries; without norms, and without rotation where the angle is 0."""
    mixed = torch.arange(2 * 2 * 4 * 6, dtype=torch.float32).view(2, 1, 2 * 4 * 6) / 10
    angles = torch.tensor([0.0, 0.7]).view(2, 1, 1, 1).expand(2, 1, 1, 6)
    query, key, value = split_heads(mixed, angles.cos(), angles.sin(), None, None, 2, 6, 1e-6)
    rows = mixed.view(2, 8, 6)
    assert query.shape == (2, 1, 4, 6) and key.shape == value.shape == (2, 1, 2, 6)
    assert query[0, 0].equal(rows[0, [0, 1, 4, 5]]) and key[0, 0].equal(rows[0, [2, 6]])
    assert value[:, 0].equal(rows[:, [3, 7]])
    turned = torch.view_as_real(torch.complex(*rows[1, 2].chunk(2)) * torch.polar(torch.ones(()), angles[1, 0, 0, 0]))
    assert (key[1, 0, 0] - turned.T.flatten()).abs().max() < 1e-5


def test_heads_are_normalised_before_they_are_rotated() -> None:
    draw = torch.Generator().manual_seed(2)
    mixed, angles = torch.randn(5, 1, 3 * 8, generator=draw), torch.randn(5, 1, 1, 8, generator=draw)
    weights = torch.rand(2, 8, generator=draw)
    query, key, _ = split_heads(mixed, angles.cos(), angles.sin(), weights[0], weights[1], 1, 8, 1e-6)
    for found, row, weight in ((query, 0, weights[0]), (key, 1, weights[1])):
        plain = mixed.view(5, 1, 3, 8)[:, :, row : row + 1]
        normed = plain / (plain.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        assert (found - rotate(normed, angles.cos(), angles.sin())).abs().max() < 1e-5


@pytest.mark.parametrize("multiple", [1, 2, 4, 16])
def test_a_pack_is_filled_up_by_a_segment_that_nothing_looks_at(multiple: int) -> None:
    samples = [Sample((1,) * n, (2,) * n, (0.0,) * n, (1,) * n) for n in (1, 3, 4)]
    batch = make_batch([Row(1.0, 1)] * 3, (3,), MicroBatch(0, (0, 1, 2)))
    plain = make_pack(batch, batch.micro_batches[0], samples, CPU)
    filled = make_pack(batch, batch.micro_batches[0], samples, CPU, multiple)
    missing = -plain.tokens.shape[1] % multiple
    assert filled.tokens[0].tolist() == plain.tokens[0].tolist() + [0] * missing
    assert filled.segments.lengths == plain.segments.lengths + ((missing,) if missing else ())
    assert torch.equal(filled.places, plain.places) and torch.equal(filled.weights, plain.weights)


def test_a_context_parallel_pack_by_hand() -> None:
    """5 and 3 tokens, filled up to 8 and 4; the ranks have chunks of 2 and of 1."""
    samples = [
        Sample((5, 6, 7), (8, 9, 10), (-0.1, -0.2, -0.3), (1, 0, 1)),
        Sample((1, 2), (3, 4), (-0.4, -0.5), (1, 1)),
    ]
    batch = make_batch([Row(0.5, 1), Row(-2.0, 4)], (8,), MicroBatch(0, (0, 1)))
    first, second = (
        make_pack(batch, batch.micro_batches[0], samples, CPU, context=ContextRank(rank, 2)) for rank in (0, 1)
    )
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([[5, 6, 0, 0, 1, 0]], [[7, 8, 9, 0, 2, 3]])
    assert first.position_ids.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert second.position_ids.tolist() == [[2, 3, 4, 5, 1, 2]]
    assert (first.places.tolist(), second.places.tolist()) == ([], [0, 1, 2, 4, 5])
    assert (first.targets.tolist(), second.targets.tolist()) == ([], [8, 9, 10, 3, 4])
    assert second.rollout_log_probs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    for segments, key_lengths in ((first.segments, (2, 8, 1, 4)), (second.segments, (4, 6, 2, 3))):
        assert segments.cu_seqlens_q.tolist() == [0, 8, 12]
        assert (segments.lengths, segments.key_lengths) == ((2, 2, 1, 1), key_lengths)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 4])
def test_what_context_parallel_ranks_sum_is_the_sum_of_one_rank(size: int, multiple: int) -> None:
    draw = random.Random(size)
    for _ in range(20):
        samples = []
        for _ in range(draw.randint(1, 5)):
            n = draw.randint(0, 12)
            prompt, response = (1,) * draw.randint(1, 20), tuple(draw.choices(range(90), k=n))
            mask = tuple(draw.choices((0, 1), k=n))
            samples.append(Sample(prompt, response, tuple(draw.choices((-0.5, -0.25), k=n)), mask))
        rows = [Row(draw.gauss(0, 1), draw.randint(1, 9)) for _ in samples]
        batch = make_batch(rows, (4,), MicroBatch(0, tuple(range(len(samples)))))
        pack = make_pack(batch, batch.micro_batches[0], samples, CPU, multiple)
        parts = [
            make_pack(batch, batch.micro_batches[0], samples, CPU, multiple, ContextRank(rank, size))
            for rank in range(size)
        ]
        assert {part.tokens.shape[1] for part in parts} == {parts[0].tokens.shape[1]}
        assert parts[0].tokens.shape[1] % multiple == 0
        assert seen([pack]) == seen(parts)


def seen(packs: list[Pack]) -> list[tuple[float, ...]]:
    """All about each response token, and the token before it with its position, in no order."""
    found = []
    for pack in packs:
        places = pack.places
        columns = pack.targets, pack.mask, pack.weights, pack.advantages, pack.rollout_log_probs
        before = pack.tokens[0, places], pack.position_ids[0, places]
        found += zip(*(column.tolist() for column in (*columns, *before)), strict=True)
    return sorted(found)


@pytest.mark.parametrize("lengths", [(4, 12, 8), (4,), (16, 4)])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_context_parallel_chunks_attend_to_the_segment_before_them(lengths: tuple[int, ...], key_heads: int) -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(sum(lengths), n, 8, generator=draw) for n in (4, key_heads, key_heads))
    attention = CoreAttention.__new__(CoreAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = None
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([causal_attention(*part) for part in parts])
    ranks = [ContextRank(rank, 2) for rank in (0, 1)]
    gathered = torch.cat([one.places(lengths) for one in ranks])
    for rank in ranks:
        mine, segments = rank.places(lengths), make_segments(lengths, CPU, rank)
        keys, values = (one[gathered][segments.key_rows] for one in (k, v))
        found = attention(q[mine], keys, values, packed_seq_params=replace(segments, key_rows=None))
        assert (found - expected[mine]).abs().max() < 1e-5
