"""The transfer plan: a pure function of what trainer ranks hold and what engines want.

Every tensor travels whole, from one rank that holds all of it; of several, the one with the fewest bytes to send so
far. Buckets follow the order of the manifest, so that the tensors of a layer arrive together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from services.common.errors import FailedPrecondition
from services.weight_sync.layout import DTYPE_BYTES, encoded_bytes, padded, plain_bytes
from services.weight_sync.records import ManifestParameter, Plan, ShardSlice, WireBucket, WireFormat, WireTensor


@dataclass(frozen=True, slots=True)
class _Held:
    """A whole tensor that some ranks hold."""

    shape: tuple[int, ...]
    dtype: str
    ranks: tuple[int, ...]


def make_plan(
    slices_by_rank: Sequence[Sequence[ShardSlice]],
    manifest: Sequence[ManifestParameter],
    quantization: str,
    bucket_bytes: int,
) -> Plan:
    """Decide what is sent, by whom, in which encoding and order.

    Args:
        slices_by_rank: What each trainer rank holds.
        manifest: What every engine wants; tensors that only the trainer has stay where they are.
        quantization: `fp8_block_128` quantises what the manifest calls quantisable; `none` nothing.
        bucket_bytes: Largest bucket; a tensor that is larger travels alone.

    Raises:
        FailedPrecondition: A wanted parameter is missing, incomplete, or of another shape or an unknown dtype.
    """
    held = _whole_tensors(slices_by_rank)
    load = [0] * len(slices_by_rank)
    queues: list[list[WireTensor]] = [[] for _ in slices_by_rank]
    for parameter in manifest:
        tensor = _wire_tensor(parameter, held, quantization)
        rank = min(held[parameter.name].ranks, key=load.__getitem__)
        load[rank] += padded(tensor.wire_bytes)
        queues[rank].append(tensor)
    buckets = tuple(bucket for rank, queue in enumerate(queues) for bucket in _pack(rank, queue, bucket_bytes))
    return Plan(buckets, sum(load), sum(plain_bytes(t.shape, t.dtype) for queue in queues for t in queue))


def agreed_manifest(manifests: Sequence[Sequence[ManifestParameter]]) -> tuple[ManifestParameter, ...]:
    """The one manifest of several engines. Raises FailedPrecondition, naming a parameter, if they differ."""
    first = tuple(manifests[0])
    for other in manifests[1:]:
        if tuple(other) != first:
            name = min({p.name for p in set(first) ^ set(other)})
            raise FailedPrecondition(f"the engines do not want the same parameters: they differ in {name}")
    return first


def _wire_tensor(parameter: ManifestParameter, held: dict[str, _Held], quantization: str) -> WireTensor:
    name, have = parameter.name, held.get(parameter.name)
    if have is None:
        raise FailedPrecondition(f"the engine wants {name}, which the trainer does not have")
    if have.shape != parameter.shape:
        raise FailedPrecondition(f"{name}: the engine wants shape {parameter.shape}, the trainer has {have.shape}")
    if not have.ranks:
        raise FailedPrecondition(f"{name}: no trainer rank holds the whole tensor")
    if have.dtype not in DTYPE_BYTES:
        raise FailedPrecondition(f"{name}: a trainer dtype of {have.dtype} cannot be sent")
    fp8 = quantization == "fp8_block_128" and parameter.quantisable and len(have.shape) == 2
    form = WireFormat.FP8_BLOCK_128 if fp8 else WireFormat.PLAIN
    dtype = have.dtype if fp8 else _narrower(have.dtype, parameter.dtype)
    return WireTensor(name, have.shape, dtype, form, encoded_bytes(have.shape, dtype, form))


def _narrower(trainer_dtype: str, engine_dtype: str) -> str:
    """The engine's dtype where that saves bytes, since the engine would round to it anyway."""
    saves = DTYPE_BYTES.get(engine_dtype, DTYPE_BYTES[trainer_dtype]) < DTYPE_BYTES[trainer_dtype]
    return engine_dtype if saves else trainer_dtype


def _whole_tensors(slices_by_rank: Sequence[Sequence[ShardSlice]]) -> dict[str, _Held]:
    held: dict[str, _Held] = {}
    for rank, slices in enumerate(slices_by_rank):
        for name, parts in _by_name(slices).items():
            shape, dtype = parts[0].full_shape, parts[0].dtype
            before = held.get(name, _Held(shape, dtype, ()))
            if any((p.full_shape, p.dtype) != (before.shape, before.dtype) for p in parts):
                raise FailedPrecondition(f"{name}: its slices do not agree on shape and dtype")
            held[name] = _Held(shape, dtype, (*before.ranks, rank) if covers(parts) else before.ranks)
    return held


def covers(parts: Sequence[ShardSlice]) -> bool:
    """True if slices of one tensor fill it without overlap."""
    filled = sum(math.prod(part.shape) for part in parts)
    return filled == math.prod(parts[0].full_shape) and not any(_overlap(a, b) for a, b in combinations(parts, 2))


def _overlap(a: ShardSlice, b: ShardSlice) -> bool:
    return all(
        a_begin < b_begin + b_size and b_begin < a_begin + a_size
        for a_begin, a_size, b_begin, b_size in zip(a.begin, a.shape, b.begin, b.shape, strict=True)
    )


def _by_name(slices: Iterable[ShardSlice]) -> dict[str, list[ShardSlice]]:
    named: dict[str, list[ShardSlice]] = {}
    for one in slices:
        named.setdefault(one.name, []).append(one)
    return named


def _pack(rank: int, tensors: Sequence[WireTensor], bucket_bytes: int) -> Iterable[WireBucket]:
    bucket: list[WireTensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + padded(tensor.wire_bytes) > bucket_bytes:
            yield WireBucket(rank, tuple(bucket), size)
            bucket, size = [], 0
        bucket.append(tensor)
        size += padded(tensor.wire_bytes)
    if bucket:
        yield WireBucket(rank, tuple(bucket), size)
