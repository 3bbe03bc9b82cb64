"""Layout and schedule between protobuf and the pure code."""

from __future__ import annotations

from flotilla.buffer.v1 import buffer_pb2 as pb
from services.common.errors import InvalidArgument
from services.common.schedule import Layout, Schedule

LARGEST = {
    "data_parallel_size": 1 << 16,
    "max_tokens_per_micro_batch": (1 << 31) - 1,
    "context_parallel_size": 1 << 10,
    "micro_batch_multiple": 1 << 10,
    "flops_per_token": 1e30,
    "flops_per_token_squared": 1e30,
}
"""Beyond any machine; what is larger is a mistake. Sums of the FLOPs of a batch stay finite."""
MAX_MICRO_BATCHES = 1 << 16
"""Of all ranks in an optimizer step, where most may be empty."""


def layout_from_proto(request: pb.LeaseBatchRequest) -> Layout:
    """What the trainer states of itself. Raises InvalidArgument that names the field."""
    for field in LARGEST:
        _check(request, field, 1 if field in ("data_parallel_size", "max_tokens_per_micro_batch") else 0)
    layout = Layout(
        data_parallel_size=request.data_parallel_size,
        max_tokens_per_micro_batch=request.max_tokens_per_micro_batch,
        context_parallel_size=request.context_parallel_size or 1,
        micro_batch_multiple=request.micro_batch_multiple or 1,
        balance_data=request.balance_data,
        flops_per_token=request.flops_per_token,
        flops_per_token_squared=request.flops_per_token_squared,
    )
    if layout.data_parallel_size * layout.micro_batch_multiple > MAX_MICRO_BATCHES:
        raise InvalidArgument(
            f"micro_batch_multiple x data_parallel_size is over {MAX_MICRO_BATCHES}", "micro_batch_multiple"
        )
    return layout


def _check(request: pb.LeaseBatchRequest, field: str, least: int) -> None:
    value = getattr(request, field)
    if not least <= value <= LARGEST[field]:  # so is NaN
        raise InvalidArgument(f"{field} = {value} is not between {least} and {LARGEST[field]}", field)


def schedule_to_proto(schedule: Schedule, manifest: pb.BatchManifest) -> None:
    """Add a schedule to the manifest of its batch."""
    manifest.micro_batches.extend(
        pb.MicroBatch(optimizer_step=one.optimizer_step, data_parallel_rank=one.data_parallel_rank, rows=one.rows)
        for one in schedule.micro_batches
    )
    manifest.schedule.packing_efficiency = schedule.stats.packing_efficiency
    manifest.schedule.imbalance = schedule.stats.imbalance
