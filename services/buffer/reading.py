"""The reading half of BufferService: counts, groups, batches, leases, evaluations, the audit."""

from __future__ import annotations

import grpc

from flotilla.buffer.v1 import buffer_pb2 as pb
from flotilla.buffer.v1 import buffer_pb2_grpc
from flotilla.common.v1 import common_pb2
from services.buffer import codec
from services.buffer.audit import audit
from services.buffer.evaluation import Evaluations
from services.buffer.records import Stats
from services.buffer.requests import page_size, page_start, page_token, require
from services.buffer.run import Run
from services.buffer.states import IN_PLAY, State, admission_credit, keep_rate
from services.common.errors import NotFound
from services.common.rpc import seconds

MAX_PAGE = 1000
DEFAULT_PAGE = 100
MAX_DISCREPANCIES = 1000

Context = grpc.aio.ServicerContext


class LedgerReader(buffer_pb2_grpc.BufferServiceServicer):
    """Answers from the ledger, and changes nothing."""

    def __init__(self, run: Run, evaluations: Evaluations) -> None:
        self._run = run
        self._ledger = run.ledger
        self._evaluations = evaluations

    async def GetBufferStats(self, request: pb.GetBufferStatsRequest, context: Context) -> pb.GetBufferStatsResponse:
        """Counts of one instant."""
        require(request, self._run)
        stats = await self._ledger.stats()
        sealed = stats.number("sealed")
        newest = await self._ledger.batches(sealed - 1, 1) if sealed else []
        last = pb.BatchManifest.FromString(newest[0][1][b"manifest"]) if newest else None
        return pb.GetBufferStatsResponse(
            issued=stats.number("issued"),
            groups=_counts(stats.train),
            conserved=stats.number("issued") == sum(stats.train.values()),
            sealed_batches=sealed,
            committed_step=stats.number("committed_step"),
            live_version=codec.live_version(stats.run),
            admission_credit=self._credit(stats),
            dropped=stats.dropped,
            failed=stats.failed,
            evaluation_issued=stats.number("eval_issued"),
            evaluation_groups=_counts(stats.evaluation),
            evaluation_conserved=stats.number("eval_issued") == sum(stats.evaluation.values()),
            overlong_prompts=self._run.training.overlong,
            last_mean_reward=last.stats.mean_reward if last else 0.0,
            stale=stats.stale,
            discarded_tokens=stats.discarded,
            memory_bytes=self._run.memory.used,
            memory_limit_bytes=self._run.memory.limit,
            back_pressure=self._run.memory.is_short and sealed > stats.number("committed_step"),
            keep_rate=self._keep_rate(stats),
            leases=stats.leases,
            lineage=stats.number("lineage"),
        )

    def _credit(self, stats: Stats) -> int:
        rollout = self._run.spec.rollout
        if stats.number("live_step", -1) < 0:
            return 0
        return admission_credit(
            rollout,
            step=min(stats.number("live_step"), stats.number("begun_step", stats.number("live_step"))),
            kept=stats.number("kept_total"),
            in_play=sum(stats.train[state] for state in IN_PLAY),
            recent_kept=stats.number("recent_kept"),
            recent_decided=stats.number("recent_decided"),
        )

    def _keep_rate(self, stats: Stats) -> float:
        return keep_rate(self._run.spec.rollout, stats.number("recent_kept"), stats.number("recent_decided"))

    async def ListGroups(self, request: pb.ListGroupsRequest, context: Context) -> pb.ListGroupsResponse:
        """Groups in a state, or in any, a page at a time."""
        require(request, self._run)
        size, start = page_size(request.page_size, DEFAULT_PAGE, MAX_PAGE), page_start(request.page_token)
        ledger = "eval" if request.kind == pb.WORK_KIND_EVALUATION else "train"
        if request.state == pb.GROUP_STATE_UNSPECIFIED:
            ids = await self._ledger.issued_ids(ledger, start, size + 1)
        else:
            ids = await self._ledger.group_ids(ledger, codec.state_from_pb(request.state), start, size + 1)
        groups = await self._ledger.groups(ids[:size])
        more = len(ids) > size
        return pb.ListGroupsResponse(
            groups=[codec.group_summary(group, self._run.prompt(group).row) for group in groups],
            next_page_token=page_token(start + size) if more else "",
        )

    async def GetGroup(self, request: pb.GetGroupRequest, context: Context) -> pb.GetGroupResponse:
        """One group with prompt and responses as text."""
        require(request, self._run, "group_id")
        (group,) = await self._ledger.groups([request.group_id])
        prompt, decode = self._run.prompt(group), self._run.tokenizer.decode
        payloads = await self._ledger.payloads((group.group_id, index) for index in group.headers())
        samples = [common_pb2.Sample.FromString(payload) for payload in payloads if payload is not None]
        return pb.GetGroupResponse(
            summary=codec.group_summary(group, prompt.row),
            samples=samples,
            prompt=decode(prompt.token_ids),
            responses=[decode(sample.response_token_ids) for sample in samples],
            label=prompt.label,
            verdicts=group.verdicts(),
        )

    async def ListBatches(self, request: pb.ListBatchesRequest, context: Context) -> pb.ListBatchesResponse:
        """Batches, a page at a time."""
        require(request, self._run)
        size, start = page_size(request.page_size, DEFAULT_PAGE, MAX_PAGE), page_start(request.page_token)
        found = await self._ledger.batches(start, size + 1)
        return pb.ListBatchesResponse(
            batches=[_batch_summary(number, fields) for number, fields in found[:size]],
            next_page_token=page_token(start + size) if len(found) > size else "",
        )

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Context) -> pb.ListLeasesResponse:
        """Leases, a page at a time."""
        require(request, self._run)
        size, start = page_size(request.page_size, DEFAULT_PAGE, MAX_PAGE), page_start(request.page_token)
        found = await self._ledger.leases(start, size + 1)
        groups = await self._ledger.groups([lease.group_id for lease in found[:size]])
        return pb.ListLeasesResponse(
            leases=map(codec.lease_summary, found[:size], groups),
            next_page_token=page_token(start + size) if len(found) > size else "",
        )

    async def AuditLedger(self, request: pb.AuditLedgerRequest, context: Context) -> pb.AuditLedgerResponse:
        """Recompute the law from the raw keys."""
        require(request, self._run)
        found = await audit(self._ledger.redis, self._ledger.prefix)
        return pb.AuditLedgerResponse(
            groups=found.groups,
            evaluation_groups=found.evaluation_groups,
            batches=found.batches,
            samples=found.samples,
            committed_groups=found.committed_groups,
            discrepancies=[
                pb.Discrepancy(subject=one.subject, problem=one.problem)
                for one in found.discrepancies[:MAX_DISCREPANCIES]
            ],
        )

    async def GetEvaluation(self, request: pb.GetEvaluationRequest, context: Context) -> pb.GetEvaluationResponse:
        """Results of a step, waiting for its end."""
        require(request, self._run)
        results = await self._run.poll(
            lambda: self._evaluations.results(request.step),
            lambda found: bool(found) and all(one.complete for one in found),
            seconds(request.wait_timeout),
        )
        return pb.GetEvaluationResponse(
            results=[
                pb.EvaluationResult(
                    name=one.name,
                    version=common_pb2.PolicyVersion(run_epoch=one.run_epoch, step=one.step),
                    mean_reward=one.mean_reward,
                    issued=one.issued,
                    scored=one.scored,
                    failed=one.failed,
                    mean_response_tokens=one.mean_response_tokens,
                    mixed_versions=one.mixed_versions,
                )
                for one in results
            ],
            complete=bool(results) and all(one.complete for one in results),
        )

    async def _batch(self, number: int) -> dict[bytes, bytes]:
        found = await self._ledger.batches(number, 1) if number >= 0 else []
        if not found:
            raise NotFound(f"batch {number} is not sealed")
        return found[0][1]


def _batch_summary(number: int, fields: dict[bytes, bytes]) -> pb.BatchSummary:
    return pb.BatchSummary(
        batch=number,
        state=f"BATCH_STATE_{fields[b'state'].decode()}",
        digest=fields[b"digest"].decode(),
        run_epoch=int(fields[b"run_epoch"]),
        commits=int(fields[b"commits"]),
        group_ids=fields[b"groups"].decode().split(),
        mean_reward=pb.BatchManifest.FromString(fields[b"manifest"]).stats.mean_reward,
    )


def _counts(counts: dict[State, int]) -> list[pb.StateCount]:
    return [pb.StateCount(state=codec.state_to_pb(state), count=count) for state, count in counts.items()]
