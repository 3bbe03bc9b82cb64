"""BufferService over the ledger: what changes it; what reads it stands in `reading.py`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence

import grpc

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.common.v1 import common_pb2
from services.buffer import codec
from services.buffer.evaluation import Evaluations
from services.buffer.filters import BufferedGroup, choose
from services.buffer.layout import layout_from_proto, schedule_to_proto
from services.buffer.reading import LedgerReader
from services.buffer.records import Fragment, Group, Stop
from services.buffer.requests import page_start, page_token, require
from services.buffer.run import RECHECK_S, Run, Turnstile
from services.buffer.states import State
from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.kill_points import kill_point
from services.common.rpc import duration, seconds
from services.common.schedule import make_schedule

PAGE_BYTES = 4 << 20
"""Small enough to be packed while the page before is on its way."""
TOKEN_BYTES = 9
"""Of a sample for each token, at most: id, log-prob and mask."""
MAX_ROWS = 4096
MAX_LEASES = 1024
"""Groups in one answer; a gateway with more room asks again."""
MAX_CHOICE = 4096
"""Interrupted groups that a buffer filter is shown, the oldest ones."""
SEED_BITS = 48
"""Base seeds are spread over all of them: generators that use only the low bits still tell groups apart."""

Context = grpc.aio.ServicerContext


class BufferServicer(LedgerReader):
    """Checks requests, calls the ledger, and wakes long polls after every change."""

    def __init__(self, run: Run, evaluations: Evaluations) -> None:
        super().__init__(run, evaluations)
        self._turnstile: Turnstile[tuple[str, str]] = Turnstile(run.pulse)

    # ------------------------------------------------------------------------------------------------ work

    async def LeaseWork(self, request: pb.LeaseWorkRequest, context: Context) -> pb.LeaseWorkResponse:
        """Lease groups, evaluation first."""
        require(request, self._run, "request_id", "worker_id")
        if request.max_groups < 1:
            raise InvalidArgument("max_groups must be at least 1", "max_groups")
        pairs = await self._lease_work(request) or []
        if not pairs and (wait_s := seconds(request.wait_timeout)):
            pairs = await self._run.poll(lambda: self._turnstile.ask(lambda: self._lease_work(request)), bool, wait_s)
        kill_point("buffer_after_lease")
        if not pairs:
            return pb.LeaseWorkResponse()
        groups = await self._ledger.groups([group_id for group_id, _ in pairs])
        saved = await self._saved_fragments(groups)
        return pb.LeaseWorkResponse(
            leases=[self._lease(group, token, saved) for group, (_, token) in zip(groups, pairs, strict=True)]
        )

    async def _lease_work(self, request: pb.LeaseWorkRequest) -> list[tuple[str, str]] | None:
        wanted = min(request.max_groups, MAX_LEASES)
        return await self._ledger.lease_work(
            request.request_id,
            request.worker_id,
            wanted,
            back_pressure=self._run.memory.is_short,
            chosen=await self._chosen(wanted),
        )

    async def _chosen(self, wanted: int) -> list[str] | None:
        """Interrupted groups that the buffer filter lets go on; None without a filter, or without such groups."""
        if self._run.buffer_filter is None:
            return None
        ids = await self._ledger.group_ids("train", State.PARTIAL, count=MAX_CHOICE)
        if not ids:
            return None
        facts = await self._ledger.run_facts()
        step = int(facts.get("sealed", 0))
        if step > int(facts["live_step"]) + self._run.spec.rollout.max_staleness:
            return []  # nothing is handed out now
        groups = [self._buffered(group, step) for group in await self._ledger.groups(ids)]
        groups.sort(key=lambda group: (group.oldest_step, group.group_id))
        return await choose(self._run.buffer_filter, step, groups, wanted)

    def _buffered(self, group: Group, step: int) -> BufferedGroup:
        prompt, oldest = self._run.prompt(group), group.number("oldest")
        return BufferedGroup(
            group_id=group.group_id,
            prompt_index=prompt.row,
            label=prompt.label,
            attempts=group.number("attempts"),
            finished_samples=group.number("finished"),
            partial_tokens=sum(group.partial_tokens().values()),
            oldest_step=oldest,
            age=step - oldest,
        )

    async def _saved_fragments(self, groups: Sequence[Group]) -> dict[tuple[str, int], list[bytes]]:
        rows = [(group.group_id, index) for group in groups for index in group.partial_tokens()]
        return dict(zip(rows, await self._ledger.fragments(rows), strict=True)) if rows else {}

    def _lease(self, group: Group, token: str, saved: dict[tuple[str, int], list[bytes]]) -> pb.WorkLease:
        spec, prompt, done = self._run.spec, self._run.prompt(group), group.headers()
        rollout, evaluation = spec.rollout, spec.evaluation
        self._run.remember(group.group_id, prompt)
        params = common_pb2.SamplingParams(
            temperature=evaluation.temperature if group.is_evaluation else rollout.temperature,
            top_p=1.0,
            top_k=-1,
            max_response_tokens=(evaluation if group.is_evaluation else rollout).max_response_tokens,
            stop_token_ids=self._run.stop_token_ids,
        )
        version = common_pb2.PolicyVersion(run_epoch=group.number("epoch"), step=group.number("step"))
        return pb.WorkLease(
            lease_token=token.encode(),
            group_id=group.group_id,
            attempt=group.number("attempts"),
            ttl=duration(rollout.lease_ttl_s),
            kind=codec.work_kind(group),
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            pending_samples=[
                codec.resumed_sample(group.group_id, index, saved.get((group.group_id, index), ()))
                for index in range(self._run.group_size(group.group_id))
                if index not in done
            ],
            seed=_group_seed(rollout.seed, group.group_id),
            required_version=version if group.is_evaluation else None,
            continue_across_versions=not group.is_evaluation and (rollout.partial_rollout or rollout.max_staleness > 0),
            mask_offpolicy_tokens=not group.is_evaluation and rollout.mask_offpolicy_in_partial_rollout,
        )

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        """Extend a lease, or say that the generation must stop."""
        require(request, self._run, "lease_token", "group_id")
        reason = await self._ledger.renew(
            request.group_id, _token(request.lease_token), self._fragments(request.group_id, request.progress)
        )
        kill_point("buffer_after_renew")
        return pb.RenewLeaseResponse(
            ttl=duration(self._run.spec.rollout.lease_ttl_s), stop_reason=codec.stop_reason(reason)
        )

    def _fragments(self, group_id: str, progress: Sequence[pb.SampleFragment]) -> list[Fragment]:
        if len({one.sample_index for one in progress}) < len(progress):
            raise InvalidArgument("progress holds a sample_index twice", "progress")
        return [codec.fragment(one, group_id, self._run.group_size(group_id)) for one in progress]

    async def WatchWork(self, request: pb.WatchWorkRequest, context: Context) -> AsyncIterator[pb.WatchWorkResponse]:
        """Say what must stop, each lease once."""
        require(request, self._run, "worker_id")
        told: set[Stop] = set()
        while True:
            seen = self._run.stop_pulse.beats
            _, stops = await self._ledger.stops(request.worker_id)
            if fresh := [stop for stop in stops if stop not in told]:
                yield pb.WatchWorkResponse(stops=map(codec.stop_to_pb, fresh))
            told = set(stops)
            await self._run.stop_pulse.wait(seen, RECHECK_S)

    async def SubmitSamples(self, request: pb.SubmitSamplesRequest, context: Context) -> pb.SubmitSamplesResponse:
        """Store finished samples."""
        require(request, self._run, "request_id", "lease_token", "group_id")
        if not request.samples:
            raise InvalidArgument("samples is empty", "samples")
        group_id, size = request.group_id, self._run.group_size(request.group_id)
        prompt = (await self._run.prompt_of(group_id)).token_ids
        if len({sample.sample_index for sample in request.samples}) < len(request.samples):
            raise InvalidArgument("samples holds a sample_index twice", "samples")
        finished = [codec.finished_sample(sample, group_id, size, prompt) for sample in request.samples]
        kill_point("buffer_before_submit")
        complete = await self._ledger.submit(group_id, _token(request.lease_token), size, finished)
        kill_point("buffer_after_submit")
        if complete:
            self._run.grade_pulse.beat()
        return pb.SubmitSamplesResponse(group_complete=complete)

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseResponse:
        """Give a lease back."""
        require(request, self._run, "request_id", "lease_token", "group_id")
        fragments = self._fragments(request.group_id, request.progress)
        await self._ledger.release(request.group_id, _token(request.lease_token), request.error, fragments)
        self._run.pulse.beat()
        return pb.ReleaseLeaseResponse()

    async def DrainWork(self, request: pb.DrainWorkRequest, context: Context) -> pb.DrainWorkResponse:
        """Empty a gateway."""
        require(request, self._run, "request_id", "worker_id")
        await self._ledger.drain(request.worker_id)
        self._run.turn()
        held, _ = await self._run.poll(
            lambda: self._ledger.stops(request.worker_id), lambda answer: not answer[0], seconds(request.wait_timeout)
        )
        return pb.DrainWorkResponse(remaining_leases=held)

    # ------------------------------------------------------------------------------------------------ batches

    async def LeaseBatch(self, request: pb.LeaseBatchRequest, context: Context) -> pb.LeaseBatchResponse:
        """Give the oldest batch that is not acknowledged, scheduled for the caller's layout."""
        require(request, self._run)
        layout = layout_from_proto(request)

        def is_answer(found: tuple[int, bytes, bool]) -> bool:
            return found[0] != -1 or self._commit_requested(found[2])

        batch, content, uncommitted = await self._run.poll(
            lambda: self._ledger.lease_batch(request.run_epoch), is_answer, seconds(request.wait_timeout)
        )
        answer = pb.LeaseBatchResponse(commit_requested=self._commit_requested(uncommitted))
        if batch < 0:
            done = batch == -2
            answer.no_batch_reason = pb.NO_BATCH_REASON_RUN_COMPLETE if done else pb.NO_BATCH_REASON_NOT_SEALED
            return answer
        answer.manifest.ParseFromString(content)
        lengths = [row.prompt_tokens + row.response_tokens for row in answer.manifest.rows]
        steps = [row.optimizer_step for row in answer.manifest.rows]
        schedule = await asyncio.to_thread(make_schedule, lengths, steps, layout)  # a large batch takes 0.4 s
        schedule_to_proto(schedule, answer.manifest)
        return answer

    def _commit_requested(self, uncommitted: bool) -> bool:
        return uncommitted and self._run.memory.wants_commit

    async def FetchSamples(self, request: pb.FetchSamplesRequest, context: Context) -> pb.FetchSamplesResponse:
        """Forward payloads untouched, a page at a time."""
        require(request, self._run)
        if len(request.rows) > MAX_ROWS:
            raise InvalidArgument(f"rows has {len(request.rows)} entries; at most {MAX_ROWS} are read at once", "rows")
        start = page_start(request.page_token)
        manifest = pb.BatchManifest.FromString((await self._batch(request.batch))[b"manifest"])
        for row in request.rows:
            if not 0 <= row < len(manifest.rows):
                raise InvalidArgument(f"rows: batch {request.batch} has no row {row}", "rows")
        wanted = [manifest.rows[row] for row in request.rows[start:]]
        count = _rows_in_page(wanted)
        payloads = await self._ledger.payloads((row.group_id, row.sample_index) for row in wanted[:count])
        page = [payload for payload in payloads if payload is not None]
        if len(page) < count:
            raise FailedPrecondition(f"tokens of batch {request.batch} are gone: it was committed some time ago")
        more = count < len(wanted)
        return pb.FetchSamplesResponse(payloads=page, next_page_token=page_token(start + count) if more else "")

    async def AckBatch(self, request: pb.AckBatchRequest, context: Context) -> pb.AckBatchResponse:
        """IN_TRAINING to TRAINED."""
        require(request, self._run, "request_id")
        await self._ledger.ack_batch(request.run_epoch, request.batch, request.digest)
        kill_point("buffer_after_ack")
        self._run.pulse.beat()
        return pb.AckBatchResponse()

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        """TRAINED to COMMITTED."""
        require(request, self._run, "request_id", "checkpoint")
        if request.step < 0:
            raise InvalidArgument("step is negative", "step")
        kill_point("buffer_before_commit")
        await self._ledger.commit(request.run_epoch, request.step, request.checkpoint)
        kill_point("buffer_after_commit")
        self._run.pulse.beat()
        return pb.CommitResponse()


def _group_seed(seed: int, group_id: str) -> int:
    """Base seed of a group, the same at every attempt; sample i adds i."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{group_id}".encode()).digest()) >> (256 - SEED_BITS)


def _token(lease_token: bytes) -> str:
    """Tokens that we gave are ASCII; any other matches no lease."""
    return lease_token.decode(errors="replace")


def _rows_in_page(rows: Sequence[pb.BatchRow]) -> int:
    """How many of the rows fill a page, at least one; by their tokens, so that no more is read than sent."""
    size = 0
    for count, row in enumerate(rows):
        size += TOKEN_BYTES * (row.prompt_tokens + row.response_tokens)
        if count and size > PAGE_BYTES:
            return count
    return len(rows)
