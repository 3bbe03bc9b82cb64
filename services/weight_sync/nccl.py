"""Buffers between GPUs, over NCCL, without anything that outlasts a deadline or takes the process down.

What torch and NCCL do by themselves, and what is done here instead (torch 2.11 to 2.13, ProcessGroupNCCL.cpp):

- A watchdog ends the process when an operation times out or fails. With TORCH_NCCL_BLOCKING_WAIT there is no watchdog,
  nor the thread that watches it; the group reads the variable when it is made.
- Connecting blocks for ever if a peer dies at the wrong moment. It is done in a thread that may be left behind.
- The kernels of an operation whose peer is dead spin until the communicator is aborted. Waits are therefore by polling,
  and every way out of a session leads through `close`.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store

from services.weight_sync.meeting import Meeting, SessionError, first_line
from services.weight_sync.streams import own_stream

GROUP_ENVIRONMENT = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    # Operations of one rank do run one after the other here: they share the links of its GPU in any case.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
_environment_lock = threading.Lock()


class NcclGroup:
    """Senders and receivers with a GPU each. Not thread-safe; every method may raise SessionError."""

    def __init__(self, meeting: Meeting, ranks: Sequence[int]) -> None:
        """Connect, and exchange a word, so that what follows finds everything warm.

        Args:
            meeting: The session.
            ranks: Its ranks that take part, this one among them.
        """
        self._meeting = meeting
        self._busy = True
        self._place = {rank: place for place, rank in enumerate(sorted(ranks))}
        left = meeting.seat.left()
        connecting = _in_background(lambda: self._connect(left), lambda connected: connected[0].abort())
        try:
            meeting.wait_until(connecting.done)
            self._group, first_words = connecting.result()
        except RuntimeError as error:
            connecting.cancel()
            raise SessionError(first_line(error)) from None
        try:
            self.finish(first_words)
        except BaseException:
            self.close()
            raise

    def post_sends(self, buffers: Sequence[torch.Tensor], ranks: Sequence[int]) -> list[Any]:
        """Start to send each buffer to each of the ranks; for `finish`."""
        self._busy = True
        return [self._group.send([buffer], self._place[rank], 0) for buffer in buffers for rank in ranks]

    def post_receives(self, buffers: Sequence[torch.Tensor], sources: Sequence[int]) -> list[Any]:
        """Start to fill each buffer from its rank; for `finish`."""
        pairs = zip(buffers, sources, strict=True)
        self._busy = True
        return [self._group.recv([buffer], self._place[source], 0) for buffer, source in pairs]

    def finish(self, operations: Sequence[Any]) -> None:
        """Wait until all are done, which must be all that were started."""
        for operation in operations:
            self._meeting.wait_until(operation.is_completed)
            operation.wait()  # raises what went wrong
        self._busy = False

    def close(self) -> None:
        """Abort the communicator, which ends what still runs.

        NCCL takes half a second; nobody waits for it where nothing runs. The thread is no daemon, so that the
        interpreter does not go from under it.
        """
        group = self._group
        del self._group
        if self._busy:
            group.abort()
        else:
            threading.Thread(target=group.abort, name="close NCCL").start()

    def _connect(self, left: timedelta) -> tuple[Any, list[Any]]:
        """The group, and the exchange of a word with each rank of the other kind, for `finish`; may block."""
        seat, members = self._meeting.seat, self._meeting.members
        others = [place for rank, place in self._place.items() if members[rank].sends != seat.sends]
        group = _make_group(self._meeting.store(left), self._place[seat.rank], len(self._place), left)
        try:
            group.eager_connect_single_device(seat.device)
            start = group.send if seat.sends else group.recv
            with own_stream(seat.device):
                words = [torch.zeros(1, dtype=torch.int32, device=seat.device) for _ in others]
                return group, [start([word], place, 0) for word, place in zip(words, others, strict=True)]
        except BaseException:
            group.abort()
            raise


def _make_group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with _environment_lock, _environment(GROUP_ENVIRONMENT):
        return nccl(store, rank, size, options)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _in_background(make: Callable[[], Any], discard: Callable[[Any], None]) -> Future[Any]:
    """Make something in a daemon thread; if the future is cancelled meanwhile, it is discarded once it is made."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            made = make()
        except Exception as error:  # noqa: BLE001  carried over to whoever waits
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(made)
            else:
                discard(made)

    threading.Thread(target=run, name="connect NCCL", daemon=True).start()
    return future
