"""What the agent holds: the registered memory, and a copy of the newest version that it has read.

The copy belongs to the agent: once it is made the trainer may go on, and any number of transfers can follow. It is
encoded at the first transfer, since only then the engines' manifest is known, and stays encoded for the next ones.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.common.errors import Aborted, FailedPrecondition
from services.common.logs import get_logger
from services.weight_sync.agent.memory import Registration, map_memory, read_tensors
from services.weight_sync.digest import Digest, total
from services.weight_sync.fingerprint import digest_bucket
from services.weight_sync.records import PolicyVersion, ShardSlice, WireBucket
from services.weight_sync.wire import encode_bucket

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A version as it travels under one plan."""

    buckets: tuple[WireBucket, ...]
    buffers: tuple[torch.Tensor, ...]
    """One for each bucket, [wire_bytes] uint8."""
    digest: Digest


@dataclass(slots=True)
class Held:
    """A version that has been read. `encode` may be called from any thread."""

    version: PolicyVersion
    slices: tuple[ShardSlice, ...]
    tensors: dict[str, torch.Tensor]
    """Whole HF tensors by name."""
    read_quantise_seconds: float
    """Grows when the version is encoded."""
    _encoded: Encoded | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def encode(self, buckets: tuple[WireBucket, ...], device: torch.device) -> Encoded:
        """The encoded buckets; kept for the next transfer with the same plan. Raises ValueError as `quantize`."""
        with self._lock:
            if self._encoded is None or self._encoded.buckets != buckets:
                begun = time.monotonic()
                buffers = tuple(encode_bucket(bucket, self.tensors, device) for bucket in buckets)
                digest = total(map(digest_bucket, buckets, buffers))
                self._encoded = Encoded(buckets, buffers, digest)
                self.read_quantise_seconds += time.monotonic() - begun
            return self._encoded


class Holder:
    """Reads announced versions, one at a time, newest first. Lives in one event loop."""

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.held: Held | None = None
        self._registration: Registration | None = None
        self._pending: PolicyVersion | None = None
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    def register(self, path: str, size_bytes: int, slices: Sequence[ShardSlice]) -> None:
        """Map the memory of the trainer; see `map_memory`. A version that is held stays."""
        new = map_memory(path, size_bytes, slices)
        if new != self._registration:
            log.info("registered shards", path=path, slices=len(slices), bytes=size_bytes)
            self._registration = new

    def announce(self, version: PolicyVersion) -> None:
        """Read a version now, unless it or a newer one is held or being read.

        Raises:
            FailedPrecondition: No memory is registered.
            Aborted: A trainer of a later epoch has announced a version.
        """
        if self._registration is None:
            raise FailedPrecondition("register the shards first")
        known = self._pending or (self.held.version if self.held else None)
        if known and version.run_epoch < known.run_epoch:
            raise Aborted(f"version {version} is of an old epoch: {known} is known")
        if known and version <= known:
            return
        self._pending = version
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name="reader")

    async def wait_read(self, version: PolicyVersion | None, timeout_s: float) -> Held | None:
        """What is held, as soon as it is `version` or newer, or after the timeout. None asks for what is held now."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: version is None or self._reached(version))
            except TimeoutError:
                pass
        return self.held

    def holding(self, version: PolicyVersion) -> Held:
        """The version, if it is what is held. Raises Aborted otherwise."""
        if self.held is None or self.held.version != version:
            held = self.held.version if self.held else "none"
            raise Aborted(f"version {version} is not held; the agent holds {held}")
        return self.held

    def _reached(self, version: PolicyVersion) -> bool:
        return self.held is not None and self.held.version >= version

    async def _read(self) -> None:
        """Read until what was read is the newest announced; memory announced anew meanwhile makes a read void."""
        try:
            while (version := self._pending) is not None:
                registration = self._registration
                assert registration is not None, "announce refuses without memory"
                begun = time.monotonic()
                tensors = await asyncio.to_thread(read_tensors, registration)
                if version == self._pending:
                    self.held = Held(version, registration.slices, tensors, time.monotonic() - begun)
                    self._pending = None
                    log.info("read a version", version=str(version), seconds=self.held.read_quantise_seconds)
                    async with self._changed:
                        self._changed.notify_all()
        finally:
            self._pending = self._reader = None
