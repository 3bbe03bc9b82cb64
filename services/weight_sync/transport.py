"""Moves buffers between the ranks of one session: gloo between CPUs, NCCL between GPUs.

A session's ranks meet in a store that the first agent keeps. Each says there that it has come, and with what backend;
only when all have does anybody build the process group, which nothing can interrupt. `abort_session` answers for
whoever is missing, so that everybody waiting learns at once that the session is over. Once bytes flow, a rank that dies
or closes breaks its connections, which ends the waits of the others; the deadline ends all that is left.
"""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, ProcessGroupGloo, Store, TCPStore

ABORTED = "aborted"
STORE_REACH_S = 5.0
"""A store that lives answers within milliseconds."""
DATA_TAG, ACK_TAG = 0, 1


class SessionError(RuntimeError):
    """The session was aborted, a rank is lost, or its time is up."""


def serve_store(bind: str) -> TCPStore:
    """A store on a free port of one interface, for as long as the object lives; it keeps no data of value."""
    # torch itself would listen on every interface.
    listener = socket.create_server((bind, 0), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)
    port = listener.getsockname()[1]
    return TCPStore(
        bind, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=_reach()
    )


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Puts the CUDA work of this thread on a stream of its own, so that it does not queue behind generation."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def abort_session(rendezvous: str, session_id: str, world_size: int) -> None:
    """Wake every rank that waits for others to join; a store that is away has nobody waiting."""
    with suppress(OSError, DistError):
        store = _connect(rendezvous, session_id)
        for rank in range(world_size):
            store.set(_here(rank), ABORTED)


class Transport:
    """One rank of one session. Not thread-safe; every method raises SessionError when the session ends early."""

    def __init__(
        self, rendezvous: str, session_id: str, rank: int, world_size: int, deadline_s: float, device: torch.device
    ) -> None:
        """Join the session and wait until everybody has.

        Args:
            rendezvous: host:port of the store.
            session_id: Names the session in the store.
            rank: This rank.
            world_size: Ranks that must join.
            deadline_s: Monotonic time at which the session ends.
            device: Where the buffers are; a CUDA device selects NCCL.
        """
        self._deadline_s, self._device = deadline_s, device
        try:
            store = _connect(rendezvous, session_id)
            _meet(store, rank, world_size, device.type, self._left())
            if device.type == "cuda":
                self._group = _nccl_group(store, rank, world_size, self._left())
            else:
                self._group = _gloo_group(store, rank, world_size, self._left(), _is_loopback(rendezvous))
        except (OSError, RuntimeError) as error:
            raise SessionError(_first_line(error)) from None

    def send(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        """Send a contiguous buffer to each of the ranks, at the same time."""
        self._finish(self._group.send([buffer], rank, DATA_TAG) for rank in ranks)

    def receive(self, buffer: torch.Tensor, rank: int) -> None:
        """Fill a contiguous buffer with what a rank sends."""
        self._finish(self._group.recv([buffer], source, DATA_TAG) for source in (rank,))

    def confirm(self, ranks: Sequence[int]) -> None:
        """Tell the senders that all has come; they must not close before."""
        word = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._finish(self._group.send([word], rank, ACK_TAG) for rank in ranks)

    def await_confirmation(self, ranks: Sequence[int]) -> None:
        """Wait for `confirm` of each of the ranks."""
        words = [torch.zeros(1, dtype=torch.int32, device=self._device) for _ in ranks]
        self._finish(self._group.recv([word], rank, ACK_TAG) for word, rank in zip(words, ranks, strict=True))

    def close(self) -> None:
        """Break the connections; whoever still waits for this rank learns it."""
        self._group.abort()
        del self._group

    def _finish(self, operations: Iterable[Any]) -> None:
        """Start all, then wait for all."""
        if problem := self._wait(operations):
            raise SessionError(problem)

    def _wait(self, operations: Iterable[Any]) -> str:
        """What went wrong, as text: an exception would keep the operations alive, and they the connections."""
        try:
            for work in list(operations):
                work.wait(self._left())
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            return _first_line(error)
        return ""

    def _left(self) -> timedelta:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise SessionError("the time of the session is up")
        return timedelta(seconds=left_s)


def _meet(store: Store, rank: int, world_size: int, backend: str, left: timedelta) -> None:
    if store.compare_set(_here(rank), "", backend) != backend.encode():
        raise SessionError("the session was aborted before it began")
    everybody = [_here(other) for other in range(world_size)]
    store.wait(everybody, left)
    said = {answer.decode() for answer in store.multi_get(everybody)}
    if ABORTED in said:
        raise SessionError("the session was aborted while its ranks were joining")
    if said != {backend}:
        raise SessionError("some ranks hold their buffers on CPU and some on CUDA: they have no common transport")


def _gloo_group(store: Store, rank: int, world_size: int, left: timedelta, local: bool) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = left
    # The name of a host need not lead to an address that works, not even from the host itself.
    options._devices = [gloo.create_device(hostname="127.0.0.1") if local else gloo.create_default_device()]
    return gloo(store, rank, world_size, options)


def _nccl_group(store: Store, rank: int, world_size: int, left: timedelta) -> Any:
    """The same operations over NCCL; no test has run it yet, since that takes two GPUs."""
    from torch.distributed import ProcessGroupNCCL

    nccl: Any = ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = left
    return nccl(store, rank, world_size, options)


def _connect(rendezvous: str, session_id: str) -> Store:
    host, _, port = rendezvous.rpartition(":")
    # torch goes on trying for several times its timeout where nobody listens.
    socket.create_connection((host, int(port)), STORE_REACH_S).close()
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_reach())
    return PrefixStore(session_id, client)


def _is_loopback(rendezvous: str) -> bool:
    host = rendezvous.rpartition(":")[0]
    return socket.gethostbyname(host).startswith("127.")


def _here(rank: int) -> str:
    return f"here/{rank}"


def _reach() -> timedelta:
    return timedelta(seconds=STORE_REACH_S)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
