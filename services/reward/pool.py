"""A pool of grader processes that no input can hang.

Every question goes to an idle worker, with a deadline that starts then. A worker that misses it, dies, or whose caller
has gone is killed with SIGKILL and replaced in the background; no answer waits for that. A worker is also replaced when
it ran out of memory or has answered many questions, so that the pool's memory stays what it was.

    ask ──cache──► an idle worker ──► answer           the worker becomes idle again
                         │  deadline, death, cancellation
                         └──► SIGKILL ──► Template.fork ──► a new worker becomes idle

A question waits for an idle worker, which another question gives back or a replacement becomes; both are bounded by the
deadline. A question whose worker died is asked again, since the worker may have been killed by someone else; after a
moment, in which other workers that the same hand killed show as dead, and only while its deadline allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from services.common.errors import ResourceExhausted
from services.common.logs import get_logger
from services.common.service import Backoff, now_s
from services.reward import metrics
from services.reward.cache import CACHE_SIZE, AnswerCache
from services.reward.processes import START_S, Template, Worker
from services.reward.verdicts import Graded, Question, Verdict
from services.reward.worker import built_in

BUILT_IN = f"{built_in.__module__}:{built_in.__name__}"
ATTEMPTS = 3
SETTLE_S = 0.1
"""Between a worker's death and the next attempt."""
MAX_ANSWERS = 1000
"""After so many a worker is replaced, whatever its libraries have gathered."""

LATE_S = 0.2
"""After a deadline; whoever hears of it later was held up himself."""

log = get_logger(__name__)


class WorkerPool:
    """Grader processes; use from one event loop."""

    def __init__(
        self,
        size: int,
        timeout_s: float,
        max_queue: int,
        *,
        network: bool = False,
        loader: str = BUILT_IN,
        cache_size: int = CACHE_SIZE,
        first_question: tuple[str, Question] | None = None,
    ) -> None:
        """Describe a pool; `start` starts it.

        Args:
            size: Workers. One more than the questions that may run into their deadline at a time, or others wait.
            timeout_s: Deadline of a question from its dispatch to a worker.
            max_queue: Questions that may wait or be in work before `reserve` refuses more.
            network: For code of the user's own: workers keep network, files, processes, memory and CPU time.
            loader: `module:function` that finds the deciding function of a grader (worker.Loader).
            cache_size: Answers that are remembered; 0 for rules that may change their mind.
            first_question: Grader and question for each new worker, which has START_S for it, to load what it needs.
        """
        self._size, self._timeout_s, self._max_queue = size, timeout_s, max_queue
        self._network, self._first_question = network, first_question
        self._template = Template(timeout_s, loader, network)
        self._cache = AnswerCache(self._answer, cache_size) if cache_size else None
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        self._workers: set[Worker] = set()
        self._replacements: set[asyncio.Task[None]] = set()
        self._reserved = 0
        self._stopped = False
        self.failure = ""
        """What went wrong when the last new worker was asked its first question."""

    @property
    def alive(self) -> int:
        """Workers that run."""
        return len(self._workers)

    @property
    def reserved(self) -> int:
        """Questions that wait or are being answered."""
        return self._reserved

    @property
    def remembers(self) -> bool:
        """Whether equal questions have the same answer."""
        return self._cache is not None

    @property
    def cut_off(self) -> bool:
        """Whether the workers have no network."""
        return all(worker.cut_off for worker in self._workers)

    async def start(self) -> None:
        """Start all workers; takes a second, for the libraries to load. Raises OSError if they do not start."""
        await asyncio.gather(*(self._add_worker() for _ in range(self._size)))
        if not self._network and not self.cut_off:
            log.warning("this system does not let grader processes be cut off from the network")

    async def stop(self) -> None:
        """Kill all workers; returns when they are gone."""
        self._stopped = True
        for task in self._replacements:
            task.cancel()
        await asyncio.gather(*self._replacements, return_exceptions=True)
        await self._template.stop(self._workers)
        self._workers.clear()

    @contextmanager
    def reserve(self, questions: int) -> Iterator[None]:
        """Take places in the queue until the block ends. Raises ResourceExhausted if too many wait already."""
        if self._reserved and self._reserved + questions > self._max_queue:
            seconds = self._reserved * self._timeout_s / self._size
            raise ResourceExhausted(f"{self._reserved} answers wait to be graded", retry_after_s=min(1.0, seconds))
        self._reserved += questions
        metrics.QUEUE.inc(questions)
        try:
            yield
        finally:
            self._reserved -= questions
            metrics.QUEUE.dec(questions)

    async def ask(self, grader: str, question: Question) -> Graded:
        """Have a question answered: as its grader does, or TIMEOUT, or ERROR if the grader or its worker fails."""
        if self._cache:
            return await self._cache.ask(grader, question)
        return (await self._answer(grader, question))[0]

    async def _answer(self, grader: str, question: Question) -> tuple[Graded, bool]:
        """The answer, and whether it would be the same again."""
        graded, spent_s, attempts = None, 0.0, 0
        while attempts < ATTEMPTS:
            graded, seconds = await self._attempt(await self._take(), grader, question, self._timeout_s - spent_s)
            spent_s += seconds
            attempts += 1
            if graded or spent_s + SETTLE_S >= self._timeout_s:
                break
            await asyncio.sleep(SETTLE_S)
            spent_s += SETTLE_S
        graded = graded or Graded(Verdict.ERROR, failure=f"{grader}: its process ended")
        if graded.verdict is Verdict.TIMEOUT:
            graded = replace(graded, failure=f"{grader}: no answer within {self._timeout_s:g} s")
        metrics.SECONDS.observe(spent_s)
        lasting = graded.verdict is not Verdict.ERROR and (attempts == 1 or graded.verdict is not Verdict.TIMEOUT)
        return replace(graded, seconds=spent_s), lasting

    async def _take(self) -> Worker:
        while (worker := await self._idle.get()) not in self._workers or worker.reader.at_eof():
            self._replace(worker, "died")
        return worker

    async def _attempt(
        self, worker: Worker, grader: str, question: Question, timeout_s: float
    ) -> tuple[Graded | None, float]:
        """One worker's answer, or None if it died; and the seconds that it took.

        Where this process was held up itself, so that the deadline shows too late, nothing is known and no time is
        counted.
        """
        began, end = now_s(), "abandoned"
        try:
            async with asyncio.timeout(timeout_s):
                graded = await worker.ask(grader, question)
            end = self._why_replaced(worker, graded)
        except TimeoutError:
            if now_s() - began > timeout_s + LATE_S:
                end = "late"
                return None, 0.0
            end, graded = "timeout", Graded(Verdict.TIMEOUT)
        finally:
            if end:
                self._replace(worker, end)
            else:
                self._idle.put_nowait(worker)
        return graded, now_s() - began

    def _why_replaced(self, worker: Worker, graded: Graded | None) -> str:
        """Why a worker that was asked is not asked again; nothing if it is."""
        if graded is None:
            return "died"
        if graded.verdict is Verdict.ERROR and not self._first_question:  # loading again would take long
            return "error"
        return "retired" if worker.answers >= MAX_ANSWERS else ""

    def _replace(self, worker: Worker, cause: str) -> None:
        """Kill a worker, unless that is done already, and start another one in the background."""
        if worker not in self._workers:
            return
        metrics.WORKER_REPLACEMENTS.labels(cause).inc()
        self._workers.discard(worker)
        worker.kill()
        if not self._stopped:
            task = asyncio.get_running_loop().create_task(self._add_worker_at_last())
            self._replacements.add(task)
            task.add_done_callback(self._replacements.discard)

    def _ended(self, worker: Worker) -> None:
        """A process has ended. One that is asked just now is replaced by whoever asks it."""
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        if not worker.busy:
            self._replace(worker, "died")

    async def _add_worker_at_last(self) -> None:
        backoff = Backoff()
        while True:
            try:
                return await self._add_worker()
            except OSError as error:
                log.warning("cannot start a grader process", error=repr(error))
            await backoff.wait()

    async def _add_worker(self) -> None:
        worker = await self._template.fork()
        if self._first_question:
            await self._prepare(worker, *self._first_question)
        self._workers.add(worker)
        asyncio.get_running_loop().add_reader(worker.pidfd, self._ended, worker)
        self._idle.put_nowait(worker)

    async def _prepare(self, worker: Worker, grader: str, question: Question) -> None:
        """Ask the first question. Raises OSError if there is no answer; one that is an error is kept in `failure`."""
        answer = None
        try:
            async with asyncio.timeout(START_S):
                answer = await worker.ask(grader, question)
        except TimeoutError:
            raise TimeoutError(f"{grader}: not loaded within {START_S:g} s") from None
        finally:
            if not answer:
                worker.kill()
        if not answer:
            raise ConnectionError(f"{grader}: a process ended while it loaded")
        self.failure = answer.failure
