"""RewardService over a worker pool.

    buffer ──Grade──► RewardServicer ──grade_cheaply──► verdict
                            │  what only sympy can decide
                            └──► WorkerPool ──socket──► grader processes

A caller of `Grade` waits for its slowest item: at most for those ahead of it in the queue and its own deadline. The
pool kills a worker that hangs, which unblocks both. A call that is cancelled gives its places back at once.
"""

from __future__ import annotations

import grpc

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc as pb_grpc
from services.common.errors import InvalidArgument
from services.common.service import ServiceHost
from services.common.spec import RewardSpec
from services.reward.graders import GRADERS
from services.reward.grading import grade_batch
from services.reward.pool import WorkerPool
from services.reward.verdicts import Graded, Item, Reason, Verdict

MAX_ITEMS = 1024
SERVICE_NAME = "flotilla.reward.v1.RewardService"


class RewardServicer(pb_grpc.RewardServiceServicer):
    """Grades in the order of arrival; holds no state."""

    def __init__(self, spec: RewardSpec, pool: WorkerPool) -> None:
        self._spec, self._pool = spec, pool

    async def Grade(self, request: pb.GradeRequest, context: grpc.aio.ServicerContext) -> pb.GradeResponse:
        """One verdict for each item, in order."""
        grader = GRADERS.get(request.grader)
        if grader is None:
            raise InvalidArgument(f"unknown grader {request.grader!r}; there are: {', '.join(GRADERS)}", "grader")
        if len(request.items) > MAX_ITEMS:
            raise InvalidArgument(f"{len(request.items)} items; send at most {MAX_ITEMS}", "items")
        require_think = self._spec.require_think
        items = [Item(one.response, one.label, one.truncated, require_think) for one in request.items]
        graded = await grade_batch(grader, items, self._pool)
        return pb.GradeResponse(items=[self._encode(one) for one in graded], grader_version=grader.version)

    async def ListGraders(
        self, request: pb.ListGradersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListGradersResponse:
        """The graders, sorted by name."""
        found = sorted(GRADERS.values(), key=lambda one: one.name)
        return pb.ListGradersResponse(
            graders=[pb.Grader(name=one.name, version=one.version, digest=one.digest) for one in found]
        )

    def _encode(self, graded: Graded) -> pb.GradedItem:
        return pb.GradedItem(
            verdict=f"VERDICT_{graded.verdict.name}",
            value=reward_of(graded, self._spec),
            reason=f"VERDICT_REASON_{graded.reason.name}",
            seconds=graded.seconds,
        )


def reward_of(graded: Graded, spec: RewardSpec) -> float:
    """What a verdict is worth in this run."""
    match graded.verdict:
        case Verdict.SCORED:
            return float(graded.reason is Reason.CORRECT)
        case Verdict.TIMEOUT:
            return spec.timeout_value
        case _:
            return spec.error_value


async def set_up(host: ServiceHost) -> None:
    """Start the workers and the servicer."""
    spec = host.spec.reward
    pool = WorkerPool(spec.workers, spec.timeout_s, spec.max_queue)
    host.on_stop.append(pool.stop)
    host.board.checks["workers"] = lambda: "" if pool.alive else "no grader process runs"
    host.board.details = lambda: {"workers": pool.alive, "questions": pool.reserved}
    with host.board.waiting("grader processes to start"):
        await pool.start()
    host.serve(SERVICE_NAME, pb_grpc.add_RewardServiceServicer_to_server, RewardServicer(spec, pool))
