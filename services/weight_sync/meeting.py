"""Where the ranks of one session meet: a store that the first agent keeps.

Each rank says there that it has come, whether it sends, and where its buffers are; only when all have does anybody
connect. Whoever is missing may be answered for as aborted, so that everybody waiting learns at once that it is over.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from services.common.cuda_ipc import gpu_uuid

ABORTED = "aborted"
PROBE_S = 5.0
"""A store that lives accepts within milliseconds."""
STORE_REACH_S = 15.0
"""torch looks up the name of the store's address at every connection, and a resolver that lost an answer waits for 5 s
before it asks again."""
POLL_S = 0.0005
LOOK_S = 0.05
"""Between two looks at the store, whether somebody aborted the session."""


class SessionError(RuntimeError):
    """The session was aborted, a rank is lost, or its time is up."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place in a session."""

    rendezvous: str
    """host:port of the store."""
    session_id: str
    """Names the session in the store."""
    rank: int
    world_size: int
    """Ranks that must join."""
    sends: bool
    """False for a rank that receives."""
    device: torch.device
    """Where its buffers are."""
    deadline_s: float
    """Monotonic time at which the session ends."""
    cancelled: threading.Event
    """Set to end this rank's part at once."""

    def left(self) -> timedelta:
        """Time to the deadline. Raises SessionError if there is none or the rank's part was cancelled."""
        if self.cancelled.is_set():
            raise SessionError("it was aborted")
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise SessionError("the time of the session is up")
        return timedelta(seconds=left_s)


@dataclass(frozen=True, slots=True)
class Member:
    """What a rank says of itself."""

    rank: int
    sends: bool
    gpu: str
    """UUID of the GPU that its buffers are on; empty where they are in main memory."""

    def __str__(self) -> str:
        return f"{'sends' if self.sends else 'receives'} {self.gpu or 'cpu'}"


class Meeting:
    """The session as one rank sees it, once all have come. Not thread-safe; every method may raise SessionError."""

    def __init__(self, seat: Seat) -> None:
        """Join, and wait until everybody has."""
        self.seat = seat
        self._store = connect_store(seat.rendezvous, seat.session_id)
        self._look_s = 0.0
        me = str(Member(seat.rank, seat.sends, gpu_uuid(seat.device) if seat.device.type == "cuda" else ""))
        if self._store.compare_set(_here(seat.rank), "", me) != me.encode():
            raise SessionError("the session was aborted before it began")
        self.members = self._wait_for_all()

    def _wait_for_all(self) -> tuple[Member, ...]:
        everybody = [_here(rank) for rank in range(self.seat.world_size)]
        self._store.wait(everybody, self.seat.left())
        said = [answer.decode() for answer in self._store.multi_get(everybody)]
        if ABORTED in said:
            raise SessionError("the session was aborted while its ranks were joining")
        return tuple(_member(rank, text) for rank, text in enumerate(said))

    def store(self, timeout: timedelta) -> Store:
        """Another connection to the store, for use in another thread."""
        return connect_store(self.seat.rendezvous, self.seat.session_id, timeout)

    def leave_store(self, timeout: timedelta) -> Store:
        """This rank's own connection to the store, once it has nothing more to say or hear."""
        self._store.set_timeout(timeout)
        return self._store

    def say(self, topic: str, text: str) -> None:
        """Let the other ranks hear something."""
        self._store.set(f"{topic}/{self.seat.rank}", text)

    def hear(self, topic: str, rank: int) -> str:
        """What a rank said, as soon as it has."""
        key = f"{topic}/{rank}"
        self.wait_until(lambda: self._store.check([key]))
        return self._store.get(key).decode()

    def take_back(self, topic: str) -> None:
        """Forget what this rank said, once nobody needs to hear it."""
        self._store.delete_key(f"{topic}/{self.seat.rank}")

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for a condition that takes no time to test."""
        while not done():
            self.seat.left()
            if time.monotonic() >= self._look_s:
                self._look_s = time.monotonic() + LOOK_S
                if self._store.check([ABORTED]):
                    raise SessionError("the session was aborted")
            time.sleep(POLL_S)


def abort_meeting(store: Store, world_size: int) -> None:
    """End a session for every rank that waits, or comes later."""
    store.set(ABORTED, ABORTED)
    for rank in range(world_size):
        store.set(_here(rank), ABORTED)


def connect_store(rendezvous: str, session_id: str, timeout: timedelta = timedelta(seconds=STORE_REACH_S)) -> Store:
    """The part of a session in the store. Raises OSError or DistError if nobody listens there."""
    host, _, port = rendezvous.rpartition(":")
    # torch goes on trying for several times its timeout where nobody listens.
    socket.create_connection((host, int(port)), PROBE_S).close()
    return PrefixStore(session_id, TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout))


def _here(rank: int) -> str:
    return f"here/{rank}"


def _member(rank: int, text: str) -> Member:
    role, _, place = text.partition(" ")
    return Member(rank, role == "sends", "" if place == "cpu" else place)


def first_line(error: Exception) -> str:
    """The text of an error without the stack that torch appends."""
    return str(error).partition("\n")[0]
