"""A pool of grader processes that no input can hang.

Every question goes to an idle worker with a deadline that starts then. A worker that misses it, dies, or whose caller
has gone is killed with SIGKILL and replaced in the background; nothing waits for it. Workers are forked by a server
process that has the libraries loaded (multiprocessing's `forkserver`), so that a new one is there within milliseconds;
this process, which serves gRPC, never forks.

A question waits for an idle worker, which another question gives back or a replacement becomes; both are bounded by the
deadline. A question whose worker died is asked again, since the worker may have been killed by someone else; after a
moment, in which other workers that the same hand killed show as dead.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess

from services.common.errors import ResourceExhausted
from services.common.logs import get_logger
from services.common.service import Backoff, now_s
from services.reward import metrics
from services.reward.verdicts import Graded, Question, Reason, Verdict
from services.reward.worker import decode_answer, encode_question, work

ATTEMPTS = 3
SETTLE_S = 0.1
"""Between a worker's death and the next attempt."""
JOIN_S = 5.0
"""For a killed process to be gone; it takes milliseconds."""

log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Worker:
    process: ForkServerProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, line: bytes) -> bytes:
        """The answer, or nothing if the worker has died."""
        try:
            self.writer.write(line)
            await self.writer.drain()
            return await self.reader.readline()
        except ConnectionError:
            return b""

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.writer.close()


class WorkerPool:
    """Grader processes; use from one event loop."""

    def __init__(self, size: int, timeout_s: float, max_queue: int) -> None:
        self._size, self._timeout_s, self._max_queue = size, timeout_s, max_queue
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([work.__module__])
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self._replacements: set[asyncio.Task[None]] = set()
        self._reserved = 0

    @property
    def alive(self) -> int:
        """Workers that run."""
        return len(self._workers)

    @property
    def reserved(self) -> int:
        """Questions that wait or are being answered."""
        return self._reserved

    async def start(self) -> None:
        """Start all workers; takes a second, for the libraries to load."""
        for _ in range(self._size):
            self._idle.put_nowait(await self._spawn())

    async def stop(self) -> None:
        """Kill all workers; returns when they are gone."""
        for task in self._replacements:
            task.cancel()
        await asyncio.gather(*self._replacements, return_exceptions=True)
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(asyncio.to_thread(worker.process.join, JOIN_S) for worker in self._workers))
        self._workers.clear()

    @contextmanager
    def reserve(self, questions: int) -> Iterator[None]:
        """Take places in the queue until the block ends. Raises ResourceExhausted if too many wait already."""
        if self._reserved and self._reserved + questions > self._max_queue:
            seconds = self._reserved * self._timeout_s / self._size
            raise ResourceExhausted(f"{self._reserved} answers wait to be graded", retry_after_s=min(1.0, seconds))
        self._reserved += questions
        metrics.QUEUE.set(self._reserved)
        try:
            yield
        finally:
            self._reserved -= questions
            metrics.QUEUE.set(self._reserved)

    async def ask(self, grader: str, question: Question) -> Graded:
        """Have a question answered: SCORED, TIMEOUT, or ERROR if its workers die or run out of memory."""
        line = encode_question(grader, question)
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(SETTLE_S)
            if graded := await self._attempt(await self._take(), line):
                return graded
        return Graded(Verdict.ERROR)

    async def _take(self) -> _Worker:
        while (worker := await self._idle.get()).reader.at_eof():
            self._replace(worker, "died")
        return worker

    async def _attempt(self, worker: _Worker, line: bytes) -> Graded | None:
        """One worker's answer, or None if it died."""
        began, failure = now_s(), "abandoned"
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(line)
            failure = "" if answer else "died"
        except TimeoutError:
            failure = "timeout"
            return Graded(Verdict.TIMEOUT, seconds=now_s() - began)
        finally:
            if failure:
                self._replace(worker, failure)
            else:
                self._idle.put_nowait(worker)
        if not answer:
            return None
        reason = decode_answer(answer)
        verdict = Verdict.ERROR if reason is Reason.UNSPECIFIED else Verdict.SCORED
        return Graded(verdict, reason, now_s() - began)

    def _replace(self, worker: _Worker, cause: str) -> None:
        metrics.WORKER_REPLACEMENTS.labels(cause).inc()
        worker.kill()
        task = asyncio.get_running_loop().create_task(self._respawn(worker))
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)

    async def _respawn(self, dead: _Worker) -> None:
        await asyncio.to_thread(dead.process.join, JOIN_S)
        self._workers.discard(dead)
        backoff = Backoff()
        while True:
            try:
                self._idle.put_nowait(await self._spawn())
                return
            except OSError as error:
                log.warning("cannot start a grader process", error=str(error))
            await backoff.wait()

    async def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            process = self._context.Process(target=work, args=(theirs, self._timeout_s), name="grader", daemon=True)
            await asyncio.to_thread(process.start)
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()  # a process that did start ends with its socket
            raise
        finally:
            theirs.close()
        worker = _Worker(process, reader, writer)
        self._workers.add(worker)
        return worker
