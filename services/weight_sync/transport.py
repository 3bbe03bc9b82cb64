"""Moves buffers between the ranks of one session, by the way that their places call for.

    in main memory                       gloo
    on GPUs, sender and receiver share   CUDA IPC: the sender says in the store where its buffers lie, and the receiver
                                         copies them (NCCL takes one rank for each GPU)
    on GPUs, each with its own           NCCL

Between GPUs a receiver says in the store when it has everything. Nothing waits beyond the deadline of the session. An
abort, here or at any other rank, ends every wait for ranks to join and every wait between GPUs; a wait inside gloo ends
with its connections.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import DistError, TCPStore

from services.common.cuda_ipc import export_memory, open_memory
from services.weight_sync.codec import memory_from_text, memory_to_text
from services.weight_sync.gloo import GlooLink
from services.weight_sync.meeting import (
    STORE_REACH_S,
    Meeting,
    Member,
    Seat,
    SessionError,
    abort_meeting,
    connect_store,
    first_line,
)
from services.weight_sync.nccl import NcclGroup

MEMORY, DONE = "memory", "done"
"""What ranks on GPUs say: where the buffers of a sender are; that a receiver has everything."""


def serve_store(bind: str) -> TCPStore:
    """A store on a free port of one interface, for as long as the object lives; it keeps no data of value."""
    # torch itself would listen on every interface.
    listener = socket.create_server((bind, 0), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=STORE_REACH_S)
    return TCPStore(
        bind, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=timeout
    )


def abort_session(rendezvous: str, session_id: str, world_size: int) -> None:
    """Wake every rank that waits; a store that is away has nobody waiting."""
    with suppress(OSError, DistError):
        abort_meeting(connect_store(rendezvous, session_id), world_size)


class Transport:
    """One rank of one session. Not thread-safe; every method raises SessionError when the session ends early."""

    def __init__(self, seat: Seat) -> None:
        """Join the session, wait until everybody has, and connect."""
        begun = time.monotonic()
        try:
            meeting = Meeting(seat)
            self._link = _link(meeting)
        except (OSError, RuntimeError) as error:
            raise SessionError(first_line(error)) from None
        self.connect_seconds = time.monotonic() - begun

    def send(self, buffers: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
        """Send contiguous buffers to each of the ranks; returns when all have everything."""
        self._move(lambda: self._link.send(buffers, ranks))

    def receive(self, buffers: Sequence[torch.Tensor], sources: Sequence[int]) -> None:
        """Fill contiguous buffers, each with what a rank sends, in the order in which that rank sends them."""
        self._move(lambda: self._link.receive(buffers, sources))

    def close(self) -> None:
        """End this rank's part; whoever still waits for it learns it, at the deadline at last."""
        self._link.close()

    def _move(self, move: Callable[[], None]) -> None:
        try:
            move()
        except torch.AcceleratorError:  # CUDA is broken in this process, which is not the session's fault alone
            raise
        except (OSError, RuntimeError) as error:
            raise SessionError(first_line(error)) from None


class CudaLink:
    """A session whose ranks have their buffers on GPUs."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._routes = find_routes(meeting.members)
        taking_part = meeting.seat.rank in self._routes.nccl
        self._nccl = NcclGroup(meeting, self._routes.nccl) if taking_part else None

    def send(self, buffers: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
        """Offer the buffers to the ranks on this GPU, send them to the others, wait until all have everything."""
        if self._routes.local:
            self._meeting.say(MEMORY, " ".join(memory_to_text(export_memory(buffer)) for buffer in buffers))
        if self._nccl is not None:
            remote = [rank for rank in ranks if rank not in self._routes.local]
            self._nccl.finish(self._nccl.post_sends(buffers, remote))
        for rank in ranks:
            self._meeting.hear(DONE, rank)
        self._meeting.take_back(MEMORY)

    def receive(self, buffers: Sequence[torch.Tensor], sources: Sequence[int]) -> None:
        """Fill the buffers and say so."""
        if self._nccl is not None:
            self._nccl.finish(self._nccl.post_receives(buffers, sources))
        else:
            for source in sorted(set(sources)):
                self._copy([b for b, rank in zip(buffers, sources, strict=True) if rank == source], source)
        self._meeting.say(DONE, "-")

    def close(self) -> None:
        """Leave."""
        if self._nccl is not None:
            self._nccl.close()

    def _copy(self, buffers: Sequence[torch.Tensor], source: int) -> None:
        """From the memory of another process on this GPU, which must not be unmapped under a copy."""
        offered = map(memory_from_text, self._meeting.hear(MEMORY, source).split())
        with ExitStack() as mapped:
            for buffer, memory in zip(buffers, offered, strict=True):
                buffer.copy_(mapped.enter_context(open_memory(memory)).tensor)
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class Routes:
    """Which ranks on GPUs reach each other how."""

    local: frozenset[int]
    """Receivers on the GPU of the sender: by CUDA IPC."""
    nccl: tuple[int, ...]
    """All others, senders included; none where nobody is left to receive."""


def find_routes(members: Sequence[Member]) -> Routes:
    """The routes of a session. Raises SessionError for places that none leads to."""
    sending = {member.gpu for member in members if member.sends}
    local = frozenset(m.rank for m in members if not m.sends and m.gpu in sending)
    senders = sum(member.sends for member in members)
    if local and senders > 1:
        raise SessionError(
            f"{senders} ranks send, and rank {min(local)} receives on the GPU of one of them: "
            "a receiver can share the GPU of a sender only if that is the only one"
        )
    apart = [member for member in members if member.rank not in local]
    gpu, ranks = Counter(member.gpu for member in apart).most_common(1)[0]
    if ranks > 1:
        raise SessionError(f"{ranks} ranks of the session share GPU {gpu}: NCCL takes one for each GPU")
    return Routes(local, tuple(m.rank for m in apart) if any(not m.sends for m in apart) else ())


def _link(meeting: Meeting) -> GlooLink | CudaLink:
    on_gpu = {bool(member.gpu) for member in meeting.members}
    if len(on_gpu) > 1:
        raise SessionError("some ranks hold their buffers on CPU and some on CUDA: they have no common transport")
    return CudaLink(meeting) if on_gpu == {True} else GlooLink(meeting)
