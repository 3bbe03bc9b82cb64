"""The buffer and its run registry, as the trainer uses them. Every call outlasts a restart of the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from flotilla.buffer.v1 import buffer_pb2, buffer_pb2_grpc, registry_pb2, registry_pb2_grpc
from services.common.board import StatusBoard
from services.common.errors import FailedPrecondition
from services.common.rpc import duration, new_request_id
from services.common.spec import RunSpec
from services.trainer.flops import SampleFlops
from services.trainer.insist import POLL_S, insist

FETCH_ROWS = 1024
"""Rows asked for at once; the contract allows 4096."""


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What the buffer says when it is asked for the next batch."""

    manifest: buffer_pb2.BatchManifest | None
    run_complete: bool
    """There is none, and none will come."""
    commit_requested: bool
    """The buffer fills up: commit a checkpoint before the batch is trained."""


class BufferClient:
    """One run's BufferService and RunRegistryService. Methods raise the errors of the contract."""

    def __init__(self, spec: RunSpec, board: StatusBoard, channel: grpc.aio.Channel) -> None:
        self._spec, self._board = spec, board
        self._buffer = buffer_pb2_grpc.BufferServiceStub(channel)
        self._registry = registry_pb2_grpc.RunRegistryServiceStub(channel)

    def _ids(self) -> dict[str, str]:
        return {"run_id": self._spec.run_id, "request_id": new_request_id()}

    async def register_run(self) -> None:
        """Agree on the run. FailedPrecondition if the buffer has another spec."""
        request = registry_pb2.RegisterRunRequest(**self._ids(), spec_digest=self._spec.digest())
        await insist(self._board, "the buffer", self._registry.RegisterRun, request)

    async def is_stopped(self) -> bool:
        """Whether somebody has ended the run."""
        request = registry_pb2.GetRunRequest(run_id=self._spec.run_id)
        run = (await insist(self._board, "the buffer", self._registry.GetRun, request)).run
        return run.desired_state == registry_pb2.DESIRED_STATE_STOPPED

    async def begin_epoch(self, step: int, checkpoint: str, batch_digests: tuple[str, ...]) -> int:
        """Open a new epoch from a checkpoint; returns its number."""
        request = registry_pb2.BeginEpochRequest(
            **self._ids(), checkpoint_step=step, checkpoint=checkpoint, batch_digests=batch_digests
        )
        return (await insist(self._board, "the buffer to open an epoch", self._registry.BeginEpoch, request)).run_epoch

    async def lease_batch(self, run_epoch: int, flops: SampleFlops) -> BatchAnswer:
        """Wait a while for the next batch, scheduled for this trainer. Aborted if another trainer runs."""
        request = buffer_pb2.LeaseBatchRequest(
            **self._ids(),
            run_epoch=run_epoch,
            data_parallel_size=self._spec.data_parallel_size,
            max_tokens_per_micro_batch=self._spec.trainer.max_tokens_per_micro_batch,
            wait_timeout=duration(POLL_S),
            context_parallel_size=self._spec.parallel.context,
            micro_batch_multiple=self._spec.parallel.micro_batch_multiple,
            balance_data=self._spec.trainer.balance_data,
            flops_per_token=flops.per_token,
            flops_per_token_squared=flops.per_token_squared,
        )
        what = "a sealed batch from the buffer"
        answer = await insist(self._board, what, self._buffer.LeaseBatch, request, poll_s=POLL_S)
        return BatchAnswer(
            manifest=answer.manifest if answer.HasField("manifest") else None,
            run_complete=answer.no_batch_reason == buffer_pb2.NO_BATCH_REASON_RUN_COMPLETE,
            commit_requested=answer.commit_requested,
        )

    async def fetch_rows(self, batch: int, rows: Sequence[int]) -> list[bytes]:
        """The serialized samples of some rows of a batch, in their order."""
        payloads: list[bytes] = []
        for begin in range(0, len(rows), FETCH_ROWS):
            payloads += await self._fetch(batch, rows[begin : begin + FETCH_ROWS])
        return payloads

    async def _fetch(self, batch: int, rows: Sequence[int]) -> list[bytes]:
        request = buffer_pb2.FetchSamplesRequest(run_id=self._spec.run_id, batch=batch, rows=rows)
        payloads: list[bytes] = []
        while True:
            page = await insist(self._board, "samples from the buffer", self._buffer.FetchSamples, request)
            payloads += page.payloads
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        if len(payloads) != len(rows):
            raise FailedPrecondition(f"batch {batch}: asked for {len(rows)} samples and got {len(payloads)}")
        return payloads

    async def ack_batch(self, run_epoch: int, manifest: buffer_pb2.BatchManifest) -> None:
        """Say that a batch is trained. Aborted if another trainer runs."""
        request = buffer_pb2.AckBatchRequest(
            **self._ids(), run_epoch=run_epoch, batch=manifest.batch, digest=manifest.digest
        )
        await insist(self._board, "the buffer to note a trained batch", self._buffer.AckBatch, request)

    async def commit(self, run_epoch: int, step: int, checkpoint: str) -> None:
        """Say that a checkpoint is final. Aborted if another trainer runs."""
        request = buffer_pb2.CommitRequest(**self._ids(), run_epoch=run_epoch, step=step, checkpoint=checkpoint)
        await insist(self._board, "the buffer to commit", self._buffer.Commit, request)

    async def evaluation_complete(self, step: int) -> bool:
        """Wait a while for the evaluation of a step to end."""
        request = buffer_pb2.GetEvaluationRequest(run_id=self._spec.run_id, step=step, wait_timeout=duration(POLL_S))
        what = f"the evaluation of step {step}"
        return (await insist(self._board, what, self._buffer.GetEvaluation, request, poll_s=POLL_S)).complete

    async def stop_run(self) -> None:
        """End the run."""
        request = registry_pb2.SetDesiredStateRequest(**self._ids(), desired_state=registry_pb2.DESIRED_STATE_STOPPED)
        await insist(self._board, "the buffer to end the run", self._registry.SetDesiredState, request)
