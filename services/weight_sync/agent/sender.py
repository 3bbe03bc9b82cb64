"""Runs transfer sessions, one at a time, each in a thread of its own that may outlive its session.

Nothing can interrupt a thread that waits inside gloo. An abort therefore answers the caller at once, wakes ranks that
are still joining or wait between GPUs, and leaves a thread inside gloo to end with its connections, or at the deadline
of the session at last.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import torch

from services.common.errors import Aborted, FailedPrecondition
from services.common.threads import in_thread
from services.weight_sync.agent.held import Held
from services.weight_sync.meeting import Seat, SessionError
from services.weight_sync.records import WireBucket
from services.weight_sync.streams import own_stream, with_index
from services.weight_sync.transport import Transport, abort_session

CLOSE_S = 2.0
"""A thread that is woken ends within milliseconds."""


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """One rank's part in a session."""

    session_id: str
    rendezvous: str
    rank: int
    world_size: int
    receivers: range
    """Their ranks."""
    buckets: tuple[WireBucket, ...] = field(repr=False)
    """What this rank sends."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Sent:
    """A transfer that every receiver has confirmed."""

    digest: str
    connect_seconds: float
    wire_seconds: float


@dataclass(slots=True)
class _Session:
    order: TransferOrder
    cancelled: threading.Event
    result: asyncio.Future[Sent]
    thread: threading.Thread


class Sender:
    """Sends what is held. Lives in one event loop."""

    def __init__(self, device: torch.device, on_broken: Callable[[BaseException], None] = lambda error: None) -> None:
        """Idle.

        Args:
            device: Where to encode what was read from main memory.
            on_broken: Told of an error after which CUDA works no more in this process.
        """
        self._device, self._on_broken = device, on_broken
        self._session: _Session | None = None

    async def run(self, order: TransferOrder, held: Held) -> Sent:
        """Send in a session, or join the one of that name that runs; another one is aborted.

        Raises:
            Aborted: The session was cut short.
            FailedPrecondition: The weights cannot be encoded.
        """
        session, old = self._session, None
        if session is None or session.order.session_id != order.session_id:
            old, session = session, _open(order, held, self._device)
            self._session = session
        if old is not None:
            await _end(old)
        try:
            return await asyncio.shield(session.result)
        except SessionError as error:
            raise Aborted(f"session {order.session_id}: {error}") from error
        except torch.AcceleratorError as error:
            self._on_broken(error)
            raise Aborted(f"session {order.session_id}: {error}") from error
        except ValueError as error:
            raise FailedPrecondition(str(error)) from error

    async def abort(self, session_id: str) -> None:
        """Cut a session short; nothing if it is not the one that runs."""
        if self._session is not None and self._session.order.session_id == session_id:
            await _end(self._session)

    async def close(self) -> None:
        """End what runs, before the process does: an interpreter must not go from under a thread inside torch."""
        if self._session is not None:
            await _end(self._session)
            await asyncio.to_thread(self._session.thread.join, CLOSE_S)


def _open(order: TransferOrder, held: Held, device: torch.device) -> _Session:
    cancelled = threading.Event()
    result, thread = in_thread(lambda: _send(order, held, device, cancelled), f"send {order.session_id}")
    return _Session(order, cancelled, result, thread)


async def _end(session: _Session) -> None:
    if session.result.done():
        return
    session.cancelled.set()
    session.result.set_exception(SessionError("it was aborted"))
    session.result.exception()  # seen, also when nobody waits
    order = session.order
    await asyncio.to_thread(abort_session, order.rendezvous, order.session_id, order.world_size)


def _send(order: TransferOrder, held: Held, device: torch.device, cancelled: threading.Event) -> Sent:
    seat = Seat(
        rendezvous=order.rendezvous,
        session_id=order.session_id,
        rank=order.rank,
        world_size=order.world_size,
        sends=True,
        device=with_index(held.device or device),
        deadline_s=time.monotonic() + order.timeout_s,
        cancelled=cancelled,
    )
    encoded = held.encode(order.buckets, seat.device)
    with own_stream(seat.device), closing(Transport(seat)) as transport:
        begun = time.monotonic()
        if encoded.messages:
            transport.send(encoded.messages, order.receivers)
        return Sent(str(encoded.digest), transport.connect_seconds, time.monotonic() - begun)
