"""What the agent holds: the registered memory, and the newest version that it has read from it.

It is encoded at the first transfer, since only then the engines' manifest is known, and stays encoded for the next
ones. From the memory of a GPU the versions after that are encoded as they are read.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import torch

from services.common.errors import Aborted, FailedPrecondition
from services.common.logs import get_logger
from services.weight_sync.agent.held import Held, read_version
from services.weight_sync.agent.memory import Registration
from services.weight_sync.records import PolicyVersion, WireBucket

log = get_logger(__name__)


class Holder:
    """Reads announced versions, one at a time, newest first. Lives in one event loop."""

    def __init__(self, on_broken: Callable[[BaseException], None] = lambda error: None) -> None:
        """Hold nothing yet.

        Args:
            on_broken: Told of an error after which CUDA works no more in this process.
        """
        self.incarnation = uuid.uuid4().hex
        self.held: Held | None = None
        self._on_broken = on_broken
        self._buckets: tuple[WireBucket, ...] = ()
        """Of the last transfer."""
        self._registration: Registration | None = None
        self._replaced: list[Registration] = []
        """Closed when nobody reads."""
        self._pending: PolicyVersion | None = None
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    def register(self, new: Registration) -> None:
        """Read from this memory from now on. A version that is held stays."""
        if new == self._registration:
            self._replaced.append(new)
        else:
            log.info("registered shards", memory=new.where, slices=len(new.slices), bytes=len(new.memory))
            self._replaced += [self._registration] if self._registration else []
            self._registration = new
        if self._reader is None:
            self._close_replaced()

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

    def use(self, version: PolicyVersion, buckets: tuple[WireBucket, ...]) -> Held:
        """The version, to be sent in these buckets, in which later versions are expected to be sent too.

        Raises:
            Aborted: Another one is held; or this one, but encoded in other buckets. Then it is forgotten, and the
                trainer, which sees another incarnation, announces it anew.
        """
        held = self.holding(version)
        if held.fits(buckets):
            self._buckets = buckets
            return held
        self.incarnation, self.held, self._buckets = uuid.uuid4().hex, None, ()
        raise Aborted(f"version {version} is held for another plan; it must be read again")

    def _reached(self, version: PolicyVersion) -> bool:
        return self.held is not None and self.held.version >= version

    async def _read(self) -> None:
        """Read until what was read is the newest announced; memory announced anew meanwhile makes a read void."""
        try:
            while (version := self._pending) is not None:
                registration = self._registration
                assert registration is not None, "announce refuses without memory"
                held = await asyncio.to_thread(read_version, version, registration, self._buckets)
                if version == self._pending:
                    self.held, self._pending = held, None
                    log.info("read a version", version=str(version), seconds=held.read_quantise_seconds)
                    async with self._changed:
                        self._changed.notify_all()
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:
            log.error("CUDA failed under a read", error=str(error))
            self._on_broken(error)
        except Exception as error:
            log.error("a read failed; the trainer sees another incarnation and announces anew", exc_info=error)
            self.incarnation = uuid.uuid4().hex
        finally:
            self._pending = self._reader = None
            self._close_replaced()

    def _close_replaced(self) -> None:
        while self._replaced:
            self._replaced.pop().close()
