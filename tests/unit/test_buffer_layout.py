"""The layout that a trainer states, and the schedule for it, between protobuf and the pure code. Nothing is faked."""

from __future__ import annotations

from typing import Any

import pytest

from flotilla.buffer.v1 import buffer_pb2 as pb
from services.buffer.layout import layout_from_proto, schedule_to_proto
from services.common.errors import InvalidArgument
from services.common.schedule import Layout, make_schedule


def request(**changes: Any) -> pb.LeaseBatchRequest:
    fields: dict[str, Any] = {"data_parallel_size": 2, "max_tokens_per_micro_batch": 64}
    return pb.LeaseBatchRequest(**fields | changes)


def test_a_layout_from_its_request():
    assert layout_from_proto(request()) == Layout(2, 64)
    full = {"context_parallel_size": 2, "micro_batch_multiple": 3, "balance_data": True, "flops_per_token": 4.0}
    assert layout_from_proto(request(**full)) == Layout(2, 64, **full)
    assert layout_from_proto(request(data_parallel_size=1 << 16)).data_parallel_size == 1 << 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data_parallel_size", 0),
        ("data_parallel_size", -1),
        ("data_parallel_size", (1 << 16) + 1),
        ("max_tokens_per_micro_batch", 0),
        ("max_tokens_per_micro_batch", -5),
        ("context_parallel_size", -1),
        ("context_parallel_size", 1025),
        ("micro_batch_multiple", -1),
        ("micro_batch_multiple", 1025),
        ("flops_per_token", -1.0),
        ("flops_per_token", float("nan")),
        ("flops_per_token_squared", float("inf")),
        ("flops_per_token_squared", 1e300),
    ],
)
def test_a_layout_that_cannot_be_is_named(field: str, value: float):
    with pytest.raises(InvalidArgument, match=field) as caught:
        layout_from_proto(request(**{field: value}))
    assert caught.value.field == field


def test_too_many_micro_batches_together_are_named():
    with pytest.raises(InvalidArgument) as caught:
        layout_from_proto(request(data_parallel_size=1 << 16, micro_batch_multiple=2))
    assert caught.value.field == "micro_batch_multiple"


def test_a_schedule_in_its_manifest():
    schedule, manifest = make_schedule([3, 4, 5], [0, 0, 1], Layout(2, 8)), pb.BatchManifest()
    schedule_to_proto(schedule, manifest)
    assert [(one.optimizer_step, one.data_parallel_rank, [*one.rows]) for one in manifest.micro_batches] == [
        (0, 0, [1]), (0, 1, [0]), (1, 0, [2]), (1, 1, []),
    ]  # fmt: skip
    assert manifest.schedule.packing_efficiency == 12 / 32
    assert manifest.schedule.imbalance == pytest.approx((4 / 3.5 + 2) / 2)
