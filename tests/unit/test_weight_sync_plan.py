"""The transfer plan: pure, nothing is faked."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.errors import FailedPrecondition
from services.weight_sync import codec
from services.weight_sync.plan import agreed_manifest, make_plan
from services.weight_sync.records import ManifestParameter, PolicyVersion, ShardSlice, WireFormat

FP8, PLAIN = WireFormat.FP8_BLOCK_128, WireFormat.PLAIN
BIG = 1 << 20


def held(name: str, shape: tuple[int, ...], dtype: str = "bfloat16") -> ShardSlice:
    return ShardSlice(name, shape, (0,) * len(shape), shape, dtype)


def wanted(name: str, shape: tuple[int, ...], quantisable: bool = False, dtype: str = "bfloat16") -> ManifestParameter:
    return ManifestParameter(name, shape, dtype, quantisable)


def test_quantises_only_what_the_manifest_says():
    slices = [held("norm", (100,)), held("q", (200, 300)), held("router", (8, 128))]
    manifest = [wanted("norm", (100,)), wanted("q", (200, 300), True), wanted("router", (8, 128))]
    plan = make_plan([slices], manifest, "fp8_block_128", BIG)
    [bucket] = plan.buckets
    assert [(t.name, t.format, t.wire_bytes) for t in bucket.tensors] == [
        ("norm", PLAIN, 200),
        ("q", FP8, 200 * 300 + 2 * 3 * 4),
        ("router", PLAIN, 2048),
    ]
    assert bucket.wire_bytes == plan.wire_bytes == 208 + 60032 + 2048
    assert plan.plain_bytes == 200 + 120000 + 2048


def test_without_quantisation_everything_is_plain():
    plan = make_plan([[held("q", (200, 300))]], [wanted("q", (200, 300), True)], "none", BIG)
    assert plan.buckets[0].tensors[0].format is PLAIN
    assert plan.wire_bytes == plan.plain_bytes == 120000


def test_a_quantisable_vector_stays_plain():
    plan = make_plan([[held("b", (128,))]], [wanted("b", (128,), True)], "fp8_block_128", BIG)
    assert plan.buckets[0].tensors[0].format is PLAIN


@pytest.mark.parametrize(
    ("trainer", "engine", "wire"),
    [("float32", "bfloat16", "bfloat16"), ("bfloat16", "float32", "bfloat16"), ("float32", "float32", "float32")],
)
def test_plain_tensors_travel_in_the_narrower_dtype(trainer, engine, wire):
    plan = make_plan([[held("a", (64,), trainer)]], [wanted("a", (64,), dtype=engine)], "none", BIG)
    assert plan.buckets[0].tensors[0].dtype == wire


def test_quantised_tensors_are_made_from_what_the_trainer_has():
    plan = make_plan([[held("q", (128, 128), "float32")]], [wanted("q", (128, 128), True)], "fp8_block_128", BIG)
    assert plan.buckets[0].tensors[0].dtype == "float32"


def test_buckets_keep_order_and_size():
    names = [f"t{i}" for i in range(7)]
    slices = [held(name, (1000,)) for name in names]
    plan = make_plan([slices], [wanted(name, (1000,)) for name in names], "none", 4100)
    assert [tuple(t.name for t in bucket.tensors) for bucket in plan.buckets] == [
        ("t0", "t1"),
        ("t2", "t3"),
        ("t4", "t5"),
        ("t6",),
    ]
    assert all(bucket.wire_bytes <= 4100 for bucket in plan.buckets)


def test_a_tensor_larger_than_a_bucket_travels_alone():
    slices = [held("a", (10,)), held("big", (5000,)), held("c", (10,))]
    manifest = [wanted("a", (10,)), wanted("big", (5000,)), wanted("c", (10,))]
    plan = make_plan([slices], manifest, "none", 4096)
    assert [len(bucket.tensors) for bucket in plan.buckets] == [1, 1, 1]


def test_what_only_the_trainer_has_stays_there():
    slices = [held("embed", (32, 8)), held("lm_head", (32, 8))]
    plan = make_plan([slices], [wanted("embed", (32, 8))], "none", BIG)
    assert [t.name for t in plan.buckets[0].tensors] == ["embed"]


def test_replicated_tensors_are_spread_over_the_ranks():
    slices = [held(f"t{i}", (1000,)) for i in range(4)]
    plan = make_plan([slices, slices], [wanted(f"t{i}", (1000,)) for i in range(4)], "none", BIG)
    assert [(b.source_rank, [t.name for t in b.tensors]) for b in plan.buckets] == [
        (0, ["t0", "t2"]),
        (1, ["t1", "t3"]),
    ]
    assert plan.wire_bytes == 8000


def test_slices_of_one_rank_may_make_up_a_tensor():
    parts = [ShardSlice("q", (4, 6), (i, 0), (2, 6), "bfloat16") for i in (0, 2)]
    assert make_plan([parts], [wanted("q", (4, 6))], "none", BIG).wire_bytes == 48


@pytest.mark.parametrize(
    ("slices", "manifest", "message"),
    [
        ([[]], [wanted("gone", (4,))], "wants gone"),
        ([[held("a", (4, 5))]], [wanted("a", (5, 4))], r"a: the engine wants shape \(5, 4\)"),
        ([[ShardSlice("a", (4,), (0,), (2,), "bfloat16")]], [wanted("a", (4,))], "a: no trainer rank holds"),
        (
            [[ShardSlice("a", (4,), (0,), (2,), "float32"), ShardSlice("a", (4,), (1,), (2,), "float32")]],
            [wanted("a", (4,))],
            "a: no trainer rank holds",
        ),
        ([[held("a", (4,)), held("a", (4,), "float32")]], [wanted("a", (4,))], "a: its slices do not agree"),
        ([[held("a", (4,), "float64")]], [wanted("a", (4,))], "a: a trainer dtype of float64"),
    ],
)
def test_what_cannot_be_sent_is_an_error_that_names_it(slices, manifest, message):
    with pytest.raises(FailedPrecondition, match=message):
        make_plan(slices, manifest, "fp8_block_128", BIG)


def test_engines_must_want_the_same():
    one, other = [wanted("a", (4,)), wanted("b", (4,))], [wanted("a", (4,)), wanted("b", (5,))]
    assert agreed_manifest([one, list(one)]) == tuple(one)
    with pytest.raises(FailedPrecondition, match="differ in b"):
        agreed_manifest([one, other])


def test_versions_order_by_epoch_first():
    assert PolicyVersion(2, 0) > PolicyVersion(1, 9) > PolicyVersion(1, 8)


def test_protobuf_round_trip():
    slices = [ShardSlice("a", (4, 6), (2, 0), (2, 6), "bfloat16", 64, (6, 1)), held("q", (200, 300))]
    plan = make_plan([[held("q", (200, 300)), held("n", (7,))]], [wanted("q", (200, 300), True)], "fp8_block_128", BIG)
    assert codec.buckets_from_proto(codec.buckets_to_proto(plan.buckets)) == plan.buckets
    assert [codec.slice_from_proto(codec.slice_to_proto(one)) for one in slices] == slices
    parameter = engine_pb2.ManifestParameter(name="q", shape=[200, 300], dtype="bfloat16", quantisable=True)
    assert codec.parameter_from_proto(parameter) == ManifestParameter("q", (200, 300), "bfloat16", True)
    version = PolicyVersion(3, 7)
    assert codec.version_from_proto(codec.version_to_proto(version)) == version


def test_the_coordinator_does_not_import_torch():
    check = "import sys, services.weight_sync.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
