"""Between protobuf and the trainer's own records."""

from __future__ import annotations

from dataclasses import fields

from flotilla.buffer.v1 import buffer_pb2
from flotilla.common.v1 import common_pb2
from flotilla.trainer.v1 import rank_pb2
from flotilla.weight_sync.v1 import agent_pb2
from services.common.errors import FailedPrecondition
from services.trainer.batch import Batch, MicroBatch, Row, Sample
from services.trainer.export import CudaWeights, SharedWeights, Slice
from services.trainer.report import MicroBatchId, Report


def batch_from_proto(manifest: buffer_pb2.BatchManifest, replica: int) -> Batch:
    """A batch, with the micro-batches of one data-parallel rank."""
    return Batch(
        number=manifest.batch,
        digest=manifest.digest,
        rows=tuple(Row(row.advantage, row.loss_denominator) for row in manifest.rows),
        rollouts_per_step=tuple(manifest.rollouts_per_step),
        micro_batches=tuple(
            MicroBatch(one.optimizer_step, tuple(one.rows))
            for one in manifest.micro_batches
            if one.data_parallel_rank == replica
        ),
    )


def rollout_metrics(stats: buffer_pb2.RolloutStats, schedule: buffer_pb2.ScheduleStats) -> dict[str, float]:
    """The `rollout/` metrics of a batch."""
    return {
        "rollout/mean_reward": stats.mean_reward,
        "rollout/kept_groups": stats.kept_groups,
        "rollout/dropped_groups": sum(stats.dropped_groups.values()),
        "rollout/mean_response_tokens": stats.mean_response_tokens,
        "rollout/truncated_ratio": stats.truncated_ratio,
        "rollout/seconds": stats.rollout_seconds,
        "rollout/tokens_per_second": stats.generated_tokens / max(stats.rollout_seconds, 1e-9),
        "rollout/max_age": stats.max_age,
        "rollout/mixed_version_samples": stats.mixed_version_samples,
        "rollout/dead_epoch_samples": stats.dead_epoch_samples,
        "rollout/packing_efficiency": schedule.packing_efficiency,
        "rollout/imbalance": schedule.imbalance,
    }


def report_from_proto(message: rank_pb2.TrainBatchResponse) -> Report:
    """What a rank says of a batch."""
    values = {one.name: getattr(message, one.name) for one in fields(Report)}
    values |= {name: list(values[name]) for name in ("grad_norms", "skipped_steps")}
    values["not_finite"] = [MicroBatchId(one.optimizer_step, one.index) for one in message.not_finite]
    return Report(**values)


def sample_from_bytes(payload: bytes) -> Sample:
    """A sample from its serialized form. Raises FailedPrecondition if its lists are not as long as each other."""
    message = common_pb2.Sample.FromString(payload)
    sample = Sample(
        tuple(message.prompt_token_ids),
        tuple(message.response_token_ids),
        tuple(message.rollout_log_probs),
        tuple(message.loss_mask),
    )
    lengths = len(sample.response), len(sample.rollout_log_probs), len(sample.loss_mask)
    if not sample.prompt or len(set(lengths)) > 1:
        raise FailedPrecondition(
            f"sample {message.sample_index} of group {message.group_id}: {len(sample.prompt)} prompt tokens, and "
            "%d response tokens, %d log-probs, %d loss-mask entries" % lengths
        )
    return sample


def registration_to_proto(weights: SharedWeights | CudaWeights) -> agent_pb2.RegisterShardsRequest:
    """Where the weights lie, for the weight agent; run, request and rank are left to the caller."""
    message = agent_pb2.RegisterShardsRequest(slices=map(slice_to_proto, weights.slices))
    if isinstance(weights, CudaWeights):
        memory = weights.memory
        message.cuda_memory.handle, message.cuda_memory.gpu_uuid = memory.handle, memory.gpu_uuid
        message.cuda_memory.offset_bytes, message.cuda_memory.size_bytes = memory.offset_bytes, memory.size_bytes
    else:
        message.shared_memory_path, message.shared_memory_bytes = str(weights.path), weights.size_bytes
    return message


def slice_to_proto(one: Slice) -> agent_pb2.ShardSlice:
    """A slice as the weight agent wants it."""
    return agent_pb2.ShardSlice(
        name=one.name,
        full_shape=one.full_shape,
        begin=one.begin,
        shape=one.shape,
        dtype=one.dtype,
        offset_bytes=one.offset_bytes,
        strides=one.strides,
    )
