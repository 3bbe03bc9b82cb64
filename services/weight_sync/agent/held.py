"""A version that the agent holds: read from the memory of the trainer, and encoded for the wire.

It belongs to the agent: once it is made the trainer may go on, and any number of transfers can follow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from services.common.errors import Aborted
from services.common.logs import get_logger
from services.weight_sync.agent.memory import Registration, read_tensors, whole_tensors
from services.weight_sync.digest import Digest, total
from services.weight_sync.digest_torch import digest_bucket
from services.weight_sync.records import PolicyVersion, ShardSlice, WireBucket
from services.weight_sync.staging import make_staging
from services.weight_sync.streams import own_stream
from services.weight_sync.wire import encode_bucket

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A version as it travels under one plan."""

    buckets: tuple[WireBucket, ...]
    messages: tuple[torch.Tensor, ...]
    """Bytes of the buckets, in order; see `Staging`."""
    digest: Digest


@dataclass(slots=True)
class Held:
    """A version that has been read. `encode` may be called from any thread."""

    version: PolicyVersion
    slices: tuple[ShardSlice, ...]
    tensors: dict[str, torch.Tensor]
    """Whole HF tensors by name. On a GPU, where memory is dear, they are given up once they are encoded."""
    read_quantise_seconds: float
    """Grows when the version is encoded."""
    device: torch.device | None = None
    """The GPU that the trainer's memory is on, if it is on one."""
    encoded: Encoded | None = None
    """For the last plan."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fits(self, buckets: tuple[WireBucket, ...]) -> bool:
        """True if these buckets can be had of it."""
        return bool(self.tensors) or (self.encoded is not None and self.encoded.buckets == buckets)

    def encode(self, buckets: tuple[WireBucket, ...], device: torch.device) -> Encoded:
        """The encoded buckets; kept for the next transfer with the same plan.

        Raises:
            ValueError: As `quantize`.
            Aborted: Another transfer has encoded it in other buckets meanwhile, and given up the tensors.
        """
        with self._lock:
            if not self.fits(buckets):
                raise Aborted(f"version {self.version} is held for another plan; it must be read again")
            if self.encoded is None or self.encoded.buckets != buckets:
                begun = time.monotonic()
                self.encoded = _encode(buckets, self.tensors, device)
                if self.device is not None:
                    self.tensors.clear()
                    torch.cuda.empty_cache()
                self.read_quantise_seconds += time.monotonic() - begun
            return self.encoded


def read_version(version: PolicyVersion, registration: Registration, buckets: tuple[WireBucket, ...]) -> Held:
    """Read a version from the memory of the trainer.

    Args:
        version: What the memory holds.
        registration: The memory.
        buckets: The plan of the last transfer. From the memory of a GPU they are encoded as they are read, which saves
            a copy of the weights; where that cannot be done the tensors are copied.
    """
    begun = time.monotonic()
    memory = registration.memory
    device = memory.device if memory.is_cuda else None
    with own_stream(memory.device):
        encoded = _encode_in_place(registration, buckets) if device and buckets else None
        tensors = {} if encoded else read_tensors(registration)
    return Held(version, registration.slices, tensors, time.monotonic() - begun, device, encoded)


def _encode_in_place(registration: Registration, buckets: tuple[WireBucket, ...]) -> Encoded | None:
    """None if the memory does not hold the tensors of the buckets as they are, or they cannot be quantised."""
    tensors = whole_tensors(registration)
    wanted = [tensor for bucket in buckets for tensor in bucket.tensors]
    if any(t.name not in tensors or tuple(tensors[t.name].shape) != t.shape for t in wanted):
        return None
    try:
        return _encode(buckets, tensors, registration.memory.device)
    except ValueError as error:  # the transfer will fail with it, and say so to the coordinator
        log.warning("the weights cannot be encoded", error=str(error))
        return None


def _encode(buckets: tuple[WireBucket, ...], tensors: Mapping[str, torch.Tensor], device: torch.device) -> Encoded:
    with own_stream(device):
        staging = make_staging(buckets, device)
        for bucket, buffer in zip(buckets, staging.buffers, strict=True):
            encode_bucket(bucket, tensors, device, buffer)
        digest = total(map(digest_bucket, buckets, staging.buffers))
        return Encoded(buckets, tuple(staging.messages), digest)
