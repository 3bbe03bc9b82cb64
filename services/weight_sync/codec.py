"""Between protobuf messages and the records of weight_sync."""

from __future__ import annotations

from collections.abc import Iterable

from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import engine_pb2
from flotilla.weight_sync.v1 import agent_pb2
from services.common.cuda_ipc import CudaMemory
from services.common.errors import InvalidArgument
from services.weight_sync.records import (
    ManifestParameter,
    PolicyVersion,
    ShardSlice,
    WireBucket,
    WireFormat,
    WireTensor,
)

_FORMATS = {
    WireFormat.PLAIN: engine_pb2.WIRE_FORMAT_PLAIN,
    WireFormat.FP8_BLOCK_128: engine_pb2.WIRE_FORMAT_FP8_BLOCK_128,
}
_FORMS = {number: form for form, number in _FORMATS.items()}


def version_to_proto(version: PolicyVersion) -> common_pb2.PolicyVersion:
    """As it travels."""
    return common_pb2.PolicyVersion(run_epoch=version.run_epoch, step=version.step)


def version_from_proto(message: common_pb2.PolicyVersion) -> PolicyVersion:
    """As it came."""
    return PolicyVersion(message.run_epoch, message.step)


def slice_to_proto(one: ShardSlice) -> agent_pb2.ShardSlice:
    """As it travels."""
    return agent_pb2.ShardSlice(
        name=one.name,
        full_shape=one.full_shape,
        begin=one.begin,
        shape=one.shape,
        dtype=one.dtype,
        offset_bytes=one.offset_bytes,
        strides=one.strides,
    )


def slice_from_proto(message: agent_pb2.ShardSlice) -> ShardSlice:
    """As it came."""
    return ShardSlice(
        message.name,
        tuple(message.full_shape),
        tuple(message.begin),
        tuple(message.shape),
        message.dtype,
        message.offset_bytes,
        tuple(message.strides),
    )


def cuda_memory_from_proto(message: agent_pb2.CudaMemory) -> CudaMemory:
    """As it came."""
    return CudaMemory(message.handle, message.offset_bytes, message.size_bytes, message.gpu_uuid)


def memory_to_text(memory: CudaMemory) -> str:
    """A word for the store where sessions meet."""
    message = agent_pb2.CudaMemory(
        handle=memory.handle,
        offset_bytes=memory.offset_bytes,
        size_bytes=memory.size_bytes,
        gpu_uuid=memory.gpu_uuid,
    )
    return message.SerializeToString().hex()


def memory_from_text(text: str) -> CudaMemory:
    """From such a word."""
    return cuda_memory_from_proto(agent_pb2.CudaMemory.FromString(bytes.fromhex(text)))


def parameter_from_proto(message: engine_pb2.ManifestParameter) -> ManifestParameter:
    """As it came."""
    return ManifestParameter(message.name, tuple(message.shape), message.dtype, message.quantisable)


def buckets_to_proto(buckets: Iterable[WireBucket]) -> list[engine_pb2.WireBucket]:
    """As they travel."""
    return [
        engine_pb2.WireBucket(
            source_rank=bucket.source_rank,
            tensors=[_tensor_to_proto(tensor) for tensor in bucket.tensors],
            wire_bytes=bucket.wire_bytes,
        )
        for bucket in buckets
    ]


def buckets_from_proto(messages: Iterable[engine_pb2.WireBucket]) -> tuple[WireBucket, ...]:
    """As they came. Raises InvalidArgument for a format that this version does not know."""
    return tuple(
        WireBucket(m.source_rank, tuple(_tensor_from_proto(tensor) for tensor in m.tensors), m.wire_bytes)
        for m in messages
    )


def _tensor_to_proto(tensor: WireTensor) -> engine_pb2.WireTensor:
    return engine_pb2.WireTensor(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        format=_FORMATS[tensor.format],
        wire_bytes=tensor.wire_bytes,
    )


def _tensor_from_proto(message: engine_pb2.WireTensor) -> WireTensor:
    form = _FORMS.get(message.format)
    if form is None:
        raise InvalidArgument(f"{message.name}: unknown wire format {message.format}", field="buckets.tensors.format")
    return WireTensor(message.name, tuple(message.shape), message.dtype, form, message.wire_bytes)
