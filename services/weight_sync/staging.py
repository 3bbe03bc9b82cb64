"""Room for the encoded buckets of a session, at either end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from services.weight_sync.records import WireBucket


@dataclass(frozen=True, slots=True)
class Staging:
    """Buffers of buckets, and the messages that they travel in."""

    buffers: list[torch.Tensor]
    """One for each bucket, [wire_bytes] uint8."""
    messages: list[torch.Tensor]
    """The same memory in larger pieces."""
    sources: list[int]
    """The rank that sends each message."""


def make_staging(buckets: Sequence[WireBucket], device: torch.device) -> Staging:
    """Allocate, uninitialised.

    In main memory a bucket is a message. On a GPU all buckets of one sender are one: a single handle to open, and a
    single operation to start from a thread that may have to wait for Python's lock each time, while a GPU would wait
    for it.

    Args:
        buckets: In order; those of one sender follow each other.
        device: Where.
    """
    if device.type == "cpu":
        buffers = [torch.empty(bucket.wire_bytes, dtype=torch.uint8) for bucket in buckets]
        return Staging(buffers, list(buffers), [bucket.source_rank for bucket in buckets])
    staging = Staging([], [], [])
    for source, group in groupby(buckets, key=lambda bucket: bucket.source_rank):
        sizes = [bucket.wire_bytes for bucket in group]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        staging.buffers.extend(message.split(sizes))
        staging.messages.append(message)
        staging.sources.append(source)
    return staging
