"""All ranks of the trainer, as rank 0 leads them: everything is asked of every rank at once.

A rank that fails fails what was asked, by its number; `watch` finds those that end or stand still. Then rank 0 ends,
the others follow, and whoever started the ranks starts all of them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from flotilla.buffer.v1 import buffer_pb2
from flotilla.common.v1 import common_pb2
from flotilla.trainer.v1 import rank_pb2 as pb
from flotilla.trainer.v1 import rank_pb2_grpc
from services.common.errors import Aborted, FailedPrecondition
from services.common.logs import get_logger
from services.common.rpc import call, new_request_id, open_channel
from services.common.spec import RunSpec
from services.trainer.codec import report_from_proto
from services.trainer.megatron import MARGIN_S
from services.trainer.rank import Rank
from services.trainer.report import Report
from services.trainer.saving import WRITE_DEADLINE_S
from services.trainer.watch import ANSWER_TIMEOUT_S, RankFailed, watch

OTHER_ERRORS_S = 2.0
"""One rank's failure makes others fail, which may be heard first."""

log = get_logger(__name__)


class Fleet:
    """Used from the event loop of rank 0."""

    def __init__(self, spec: RunSpec, me: Rank) -> None:
        self._spec, self._me = spec, me
        self._hang_timeout_s = spec.trainer.hang_timeout_s
        self._channels = [open_channel(one.grpc) for one in spec.services.trainers]
        _, *self._others = self._ranks = [rank_pb2_grpc.TrainerRankServiceStub(one) for one in self._channels]

    async def watch(self) -> None:
        """Raises RankFailed or DeadlineExceeded when a rank ends or stands still."""
        ranks = dict(enumerate(self._ranks)) if self._others else {}
        await watch(self._spec.run_id, self._me.fleet_id, ranks, self._hang_timeout_s)

    async def close(self) -> None:
        """Close the channels."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def load(self, step: int | None) -> None:
        """Load the checkpoint of a step, or the initial weights."""
        await self._ask("LoadState", pb.LoadStateRequest(step=step))

    async def train(self, manifest: buffer_pb2.BatchManifest) -> list[Report]:
        """Train on a batch. Returns the reports by rank."""
        parts = 1 + 2 * len(manifest.micro_batches) + manifest.optimizer_steps  # samples, log-probs, training
        answers = await self._ask("TrainBatch", pb.TrainBatchRequest(manifest=manifest), parts)
        return [report_from_proto(one) for one in answers]

    async def export(self, version: common_pb2.PolicyVersion) -> None:
        """Hand the weights to the agents, and see them read."""
        await self._ask("ExportVersion", pb.ExportVersionRequest(version=version))

    async def begin_save(self, step: int, batch_digests: Sequence[str]) -> None:
        """Begin the checkpoint of a step; training may go on when this returns."""
        await self._ask("BeginSave", pb.BeginSaveRequest(step=step, batch_digests=batch_digests))

    async def finish_save(self, *, wait: bool) -> bool:
        """Finish the checkpoint that was begun, if that needs no waiting or is waited for. Whether it is final."""
        parts = 1 + wait * WRITE_DEADLINE_S / self._hang_timeout_s
        answers = await self._ask("FinishSave", pb.FinishSaveRequest(wait=wait), parts)
        return answers[0].final

    async def export_model(self) -> None:
        """Write the model as a Hugging Face checkpoint."""
        await self._ask("ExportModel", pb.ExportModelRequest())

    async def end(self) -> None:
        """End the other ranks in order."""
        request = self._addressed(pb.EndRankRequest())
        await asyncio.gather(*(call(one.EndRank, request, timeout_s=ANSWER_TIMEOUT_S) for one in self._others))

    def _addressed(self, request: Any) -> Any:
        request.run_id, request.request_id, request.fleet_id = self._spec.run_id, new_request_id(), self._me.fleet_id
        return request

    async def _ask(self, method: str, request: Any, parts: float = 1) -> list[Any]:
        """The answers of all ranks. If one fails, raises its error, naming it.

        `parts` is how many things a rank begins one after the other; a rank that stands still at one is found by
        `watch`, and the deadline lies beyond that.
        """
        self._addressed(request)
        deadline_s = parts * self._hang_timeout_s + MARGIN_S
        mine = asyncio.ensure_future(getattr(self._me, method)(request, None))
        others = [
            asyncio.ensure_future(call(getattr(one, method), request, timeout_s=deadline_s, patience_s=0.0))
            for one in self._others
        ]
        asked = [mine, *others]
        try:
            await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
            if all(one.done() and not one.exception() for one in asked):
                return [one.result() for one in asked]
            await asyncio.wait(asked, timeout=OTHER_ERRORS_S)
            raise _most_telling(asked)
        finally:
            for one in asked:
                one.cancel()


def _most_telling(asked: Sequence[asyncio.Future[Any]]) -> BaseException:
    """What a rank says of itself, before what others saw of it; the ranks are named."""
    failed = {rank: one.exception() for rank, one in enumerate(asked) if one.done() and not one.cancelled()}
    errors = {rank: error for rank, error in failed.items() if error}
    for rank, error in errors.items():
        log.error("a rank failed", rank=rank, error=str(error))
    for rank, error in errors.items():
        if isinstance(error, FailedPrecondition | Aborted):
            return type(error)(f"rank {rank}: {error}") if rank else error
    for rank, error in errors.items():
        if rank:
            return RankFailed(f"rank {rank}: {error}")
    return errors[0]
