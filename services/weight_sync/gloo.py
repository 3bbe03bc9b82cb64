"""Buffers between CPUs, over gloo: a rank that dies or closes breaks its connections, which ends all waits for it."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo

from services.weight_sync.meeting import Meeting, SessionError, first_line

DATA_TAG, ACK_TAG = 0, 1


class GlooLink:
    """All ranks of a session, connected. Every method raises SessionError when the session ends early."""

    def __init__(self, meeting: Meeting) -> None:
        self._seat = seat = meeting.seat
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = seat.left()
        # The name of a host need not lead to an address that works, not even from the host itself.
        local = _is_loopback(seat.rendezvous)
        options._devices = [gloo.create_device(hostname="127.0.0.1") if local else gloo.create_default_device()]
        self._group = gloo(meeting.leave_store(seat.left()), seat.rank, seat.world_size, options)

    def send(self, buffers: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
        """Send each buffer to all the ranks at the same time, and wait until they have confirmed the last."""
        for buffer in buffers:
            self._finish(self._group.send([buffer], rank, DATA_TAG) for rank in ranks)
        words = [_word() for _ in ranks]
        self._finish(self._group.recv([word], rank, ACK_TAG) for word, rank in zip(words, ranks, strict=True))

    def receive(self, buffers: Sequence[torch.Tensor], sources: Sequence[int]) -> None:
        """Fill each buffer from its rank, then tell the senders that all has come; they must not close before."""
        for buffer, source in zip(buffers, sources, strict=True):
            self._finish(self._group.recv([buffer], rank, DATA_TAG) for rank in (source,))
        self._finish(self._group.send([_word()], rank, ACK_TAG) for rank in sorted(set(sources)))

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
                work.wait(self._seat.left())
        except RuntimeError as error:
            return first_line(error)
        return ""


def _word() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


def _is_loopback(rendezvous: str) -> bool:
    host = rendezvous.rpartition(":")[0]
    return socket.gethostbyname(host).startswith("127.")
