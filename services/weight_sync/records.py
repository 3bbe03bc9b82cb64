"""What weight_sync talks about: versions, slices, manifests, wire tensors, buckets and plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """The weights after rollout step `step` of epoch `run_epoch`; a later version compares greater."""

    run_epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.run_epoch}/{self.step}"


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """An N-dimensional slice of one HF tensor in the memory of a trainer rank."""

    name: str
    full_shape: tuple[int, ...]
    begin: tuple[int, ...]
    """First index in each dimension of the whole tensor."""
    shape: tuple[int, ...]
    dtype: str
    """float32, bfloat16 or float16."""
    offset_bytes: int = 0
    """First element, from the start of the memory."""
    strides: tuple[int, ...] = ()
    """In elements."""


@dataclass(frozen=True, slots=True)
class ManifestParameter:
    """One parameter that an engine wants."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """dtype in the engine."""
    quantisable: bool
    """True for the matrix of a linear layer that block quantisation applies to."""


class WireFormat(Enum):
    """How the bytes of a tensor are encoded."""

    PLAIN = auto()
    FP8_BLOCK_128 = auto()


@dataclass(frozen=True, slots=True)
class WireTensor:
    """One whole HF tensor on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """dtype before encoding."""
    format: WireFormat
    wire_bytes: int
    """Without padding."""


@dataclass(frozen=True, slots=True)
class WireBucket:
    """Tensors that travel as one message, in order, each padded to 16 bytes."""

    source_rank: int
    tensors: tuple[WireTensor, ...]
    wire_bytes: int
    """With padding."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every receiver gets, in order."""

    buckets: tuple[WireBucket, ...] = field(repr=False)
    wire_bytes: int
    """To one receiver, with padding."""
    plain_bytes: int
    """The same tensors before encoding."""
