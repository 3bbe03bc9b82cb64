"""Starts, watches and kills the processes of a pool; nothing of it waits for a process to cooperate.

A template process (services/reward/template.py) forks the workers, so that a new one is there within milliseconds, and
so that this process, which may serve gRPC, never forks. It is started again if it has died, with all its workers.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from services.reward.template import CUT_OFF
from services.reward.verdicts import Graded, Question
from services.reward.worker import decode_answer, encode_question

START_S = 60.0
"""For a template to load its libraries; it takes about a second on an idle machine."""
END_S = 5.0
"""For killed processes to be gone; it takes milliseconds."""
PROCESS_GROUP = 1 << 2
"""PIDFD_SIGNAL_PROCESS_GROUP of pidfd_send_signal(2)."""
MAX_LINE_BYTES = 1 << 20
"""Of an answer."""


@dataclass(slots=True, eq=False)
class Worker:
    """One grader process."""

    pidfd: int
    cut_off: bool
    """It has no network."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    answers: int = 0
    busy: bool = False
    """It is being asked."""

    async def ask(self, grader: str, question: Question) -> Graded | None:
        """The answer; None if the worker has died, or said something else."""
        self.answers += 1
        self.busy = True
        try:
            self.writer.write(encode_question(self.answers, grader, question))
            await self.writer.drain()
            return decode_answer(self.answers, await self.reader.readline())
        except (ConnectionError, ValueError, TypeError):
            return None
        finally:
            self.busy = False

    def kill(self) -> None:
        """End it at once, with the processes that it started where the system can (Linux 6.9)."""
        if self.pidfd >= 0:
            with suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self.pidfd)
            with suppress(OSError):  # there is no such flag, or no group
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL, None, PROCESS_GROUP)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            os.close(self.pidfd)
            self.pidfd = -1
        self.writer.close()


class Template:
    """The process that forks workers; use from one event loop."""

    def __init__(self, timeout_s: float, loader: str, network: bool) -> None:
        self._arguments = [str(timeout_s), loader, *(["--network"] if network else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def fork(self) -> Worker:
        """A new worker. Raises OSError if there is none within START_S; the next attempt starts a new template."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._running(), [b"f"], [theirs.fileno()])
            async with asyncio.timeout(START_S):
                hello, pidfd = await _receive_hello(ours)
                reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        except BaseException as error:
            ours.close()  # a worker that did start ends with its socket
            if isinstance(error, TimeoutError):
                self._kill()  # it hangs, or was stopped
                raise TimeoutError(f"no grader process started within {START_S:g} s") from None
            raise
        return Worker(pidfd, hello == CUT_OFF, reader, writer)

    async def stop(self, workers: Iterable[Worker]) -> None:
        """Kill the template and these workers; returns when they are gone."""
        pidfds = [os.dup(worker.pidfd) for worker in workers if worker.pidfd >= 0]
        for worker in workers:
            worker.kill()
        self._kill()
        await asyncio.to_thread(_wait_until_gone, self._process, pidfds)

    def _running(self) -> socket.socket:
        """The socket of a template that runs; it is started if there is none."""
        if self._control and self._process and self._process.poll() is None:
            return self._control
        self._kill()
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        with theirs:
            command = [sys.executable, "-m", "services.reward.template", str(theirs.fileno()), *self._arguments]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        return self._control

    def _kill(self) -> None:
        if self._control:
            self._control.close()
        if self._process:
            self._process.kill()


async def _receive_hello(sock: socket.socket) -> tuple[bytes, int]:
    """What a new worker says of itself, and its pidfd. Raises ConnectionError if it has died."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
    hello, fds, _, _ = socket.recv_fds(sock, 1, 1)
    if not fds:
        raise ConnectionError("a grader process died at its start")
    return hello, fds[0]


def _wait_until_gone(process: subprocess.Popen[bytes] | None, pidfds: list[int]) -> None:
    for pidfd in pidfds:
        end = select.poll()
        end.register(pidfd, select.POLLIN)
        end.poll(END_S * 1000)
        os.close(pidfd)
    if process:
        process.wait(END_S)
