"""All ranks of the trainer, as rank 0 leads them: everything is asked of every rank at once.

A rank that fails, ends or stands still fails what was asked, within a bounded time and by its number. Then rank 0 ends,
and whoever started the ranks starts all of them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flotilla.buffer.v1 import buffer_pb2
from flotilla.common.v1 import common_pb2
from flotilla.trainer.v1 import rank_pb2 as pb
from flotilla.trainer.v1 import rank_pb2_grpc
from services.common.errors import Aborted, DeadlineExceeded, FailedPrecondition, FlotillaError, Unavailable
from services.common.logs import get_logger
from services.common.rpc import call, new_request_id, open_channel, seconds
from services.common.service import now_s
from services.common.spec import RunSpec
from services.trainer.codec import report_from_proto
from services.trainer.rank import Rank
from services.trainer.report import Report

START_S = 60.0
"""The ranks have met, but a server may not listen yet."""
LONGEST_S = 7200.0
"""Beyond anything that is asked; a rank that stands still is found long before."""
WATCH_EVERY_S = 2.0
STATUS_TIMEOUT_S = 5.0
OTHER_ERRORS_S = 2.0
"""One rank's failure makes others fail, which may be heard first."""

log = get_logger(__name__)


class RankFailed(Unavailable):
    """A rank cannot go on; the message names it. A restart of all ranks may help."""


@dataclass(slots=True)
class _Seen:
    """A rank as it was when it last went on."""

    progress: int
    at_s: float
    doing: str
    answers: bool = True


class Fleet:
    """Used from the event loop of rank 0."""

    def __init__(self, spec: RunSpec, me: Rank) -> None:
        self._spec, self._me = spec, me
        self._channels = [open_channel(one.grpc) for one in spec.services.trainer_ranks]
        self._others = [rank_pb2_grpc.TrainerRankServiceStub(channel) for channel in self._channels]

    async def close(self) -> None:
        """Close the channels."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def load(self, step: int | None) -> None:
        """Load the checkpoint of a step, or the initial weights."""
        await self._ask("LoadState", pb.LoadStateRequest(step=step))

    async def train(self, manifest: buffer_pb2.BatchManifest) -> list[Report]:
        """Train on a batch. Returns the reports by rank."""
        return [
            report_from_proto(one) for one in await self._ask("TrainBatch", pb.TrainBatchRequest(manifest=manifest))
        ]

    async def export(self, version: common_pb2.PolicyVersion) -> None:
        """Hand the weights to the agents, and see them read."""
        await self._ask("ExportVersion", pb.ExportVersionRequest(version=version))

    async def save(self, step: int, batch_digests: Sequence[str]) -> None:
        """Write the checkpoint of a step; final on disk when this returns."""
        await self._ask("SaveState", pb.SaveStateRequest(step=step, batch_digests=batch_digests))

    async def export_model(self) -> None:
        """Write the model as a Hugging Face checkpoint."""
        await self._ask("ExportModel", pb.ExportModelRequest())

    async def end(self) -> None:
        """End the other ranks in order."""
        request = self._addressed(pb.EndRankRequest())
        await asyncio.gather(*(call(one.EndRank, request, timeout_s=STATUS_TIMEOUT_S) for one in self._others))

    def _addressed(self, request: Any) -> Any:
        request.run_id, request.request_id, request.fleet_id = self._spec.run_id, new_request_id(), self._me.fleet_id
        return request

    async def _ask(self, method: str, request: Any) -> list[Any]:
        """The answers of all ranks. Raises FlotillaError, naming the rank, if one fails or stands still."""
        self._addressed(request)
        mine = asyncio.ensure_future(getattr(self._me, method)(request, None))
        others = [
            asyncio.ensure_future(call(getattr(one, method), request, timeout_s=LONGEST_S, patience_s=0.0))
            for one in self._others
        ]
        asked = [mine, *others]
        answers, watch = asyncio.gather(*asked), asyncio.create_task(self._watch())
        try:
            await asyncio.wait([answers, watch], return_when=asyncio.FIRST_COMPLETED)
            if answers.done() and not answers.exception():
                return answers.result()
            await asyncio.wait(asked, timeout=OTHER_ERRORS_S)
            raise self._failure(asked, watch)
        finally:
            for one in (*asked, watch):
                one.cancel()
            await asyncio.wait([*asked, watch], timeout=STATUS_TIMEOUT_S)

    def _failure(self, asked: Sequence[asyncio.Future[Any]], watch: asyncio.Task[None]) -> BaseException:
        """The most telling of the errors: what a rank says of itself, before what others saw of it."""
        failed = {rank: one.exception() for rank, one in enumerate(asked) if one.done() and one.exception()}
        for rank, error in failed.items():
            log.error("a rank failed", rank=rank, error=str(error))
        for rank, error in failed.items():
            if isinstance(error, FailedPrecondition | Aborted):
                return type(error)(f"rank {rank}: {error}")
        for rank, error in failed.items():
            if rank and isinstance(error, FlotillaError):
                return RankFailed(f"rank {rank}: {error}")
        if watch.done() and (hang := watch.exception()):
            return hang
        return failed[0] or RankFailed("a rank failed")

    async def _watch(self) -> None:
        """Raises DeadlineExceeded when one rank of several stands still; else it never ends."""
        ranks = range(len(self._channels) + 1)
        seen = {rank: _Seen(-1, now_s(), "nothing") for rank in ranks}
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            await asyncio.gather(*(self._look(rank, seen[rank]) for rank in ranks))
            if self._others and now_s() - min(one.at_s for one in seen.values()) > self._spec.trainer.hang_timeout_s:
                raise DeadlineExceeded(describe_hang(seen))

    async def _look(self, rank: int, seen: _Seen) -> None:
        request = pb.GetRankStatusRequest(run_id=self._spec.run_id)
        seen.answers = False
        with suppress(FlotillaError):
            if rank:
                status = await call(self._others[rank - 1].GetRankStatus, request, timeout_s=STATUS_TIMEOUT_S)
            else:
                status = await self._me.GetRankStatus(request, None)
            seen.answers, seen.doing = True, status.doing
            if status.progress != seen.progress:
                seen.progress, seen.at_s = status.progress, now_s() - seconds(status.since)


def describe_hang(seen: dict[int, _Seen]) -> str:
    """Which ranks hold up the others: those that do not answer, else those that began the least."""
    silent = [rank for rank, one in seen.items() if not one.answers]
    least = min(one.progress for one in seen.values())
    culprits = silent or [rank for rank, one in seen.items() if one.progress == least]
    parts = [
        f"rank {rank} {'answers' if seen[rank].answers else 'does not answer'}, at: {seen[rank].doing}, "
        f"for {now_s() - seen[rank].at_s:.0f} s"
        for rank in culprits
    ]
    return "the trainer stands still: " + "; ".join(parts)
