"""RewardService over a worker pool.

    buffer ──Grade──► RewardServicer ──grade_cheaply──► verdict
                            │  what only sympy can decide
                            ├──► WorkerPool ──socket──► grader processes
                            │  what a function of the user's own, or a remote server, decides
                            └──► WorkerPool ──socket──► processes with network

A caller of `Grade` waits for its slowest item: at most for those ahead of it in the queue and its own deadline. The
pool kills a worker that hangs, which unblocks both. A call that is cancelled gives its places back at once.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla.reward.v1 import reward_pb2_grpc as pb_grpc
from services.common.errors import InvalidArgument
from services.common.service import ServiceHost
from services.common.spec import RewardSpec
from services.reward.custom import custom_grader
from services.reward.graders import GRADERS, Grader, find_grader
from services.reward.grading import grade_each
from services.reward.pools import Pools
from services.reward.verdicts import Graded, Item, Verdict

MAX_ITEMS = 1024
MAX_NAME_CHARACTERS = 100
"""Of a name that is quoted in an error."""
LARGE_CHARACTERS = 100_000
SERVICE_NAME = "flotilla.reward.v1.RewardService"


class RewardServicer(pb_grpc.RewardServiceServicer):
    """Grades in the order of arrival; holds no state."""

    def __init__(self, spec: RewardSpec, pools: Pools) -> None:
        self._spec, self._pools = spec, pools
        self._custom_grader = custom_grader(spec) if spec.is_custom else None

    async def Grade(self, request: pb.GradeRequest, context: grpc.aio.ServicerContext) -> pb.GradeResponse:
        """One verdict for each item, in order."""
        if len(request.items) > MAX_ITEMS:
            raise InvalidArgument(f"{len(request.items)} items; send at most {MAX_ITEMS}", "items")
        names = [one.grader or request.grader for one in request.items]
        graders = {name: self._grader(name) for name in {*names, request.grader} - {""}}
        if "" in names:
            raise InvalidArgument("neither the item nor the request names a grader", "grader")
        asked = []
        for name, one in zip(names, request.items, strict=True):
            asked.append((graders[name], self._item(one)))
            if len(one.metadata) > LARGE_CHARACTERS:
                await asyncio.sleep(0)  # it took milliseconds to parse
        graded = await grade_each(asked, self._pools.of)
        encoded = [self._encode(name, graders[name].version, one) for name, one in zip(names, graded, strict=True)]
        return pb.GradeResponse(items=encoded, grader_version=graders[request.grader].version if request.grader else "")

    async def ListGraders(
        self, request: pb.ListGradersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListGradersResponse:
        """The graders, sorted by name."""
        found = {one.name: one for one in GRADERS.values()}
        if self._custom_grader:
            found[self._spec.grader] = self._custom_grader
        return pb.ListGradersResponse(
            graders=[
                pb.Grader(name=name, version=one.version, digest=one.digest) for name, one in sorted(found.items())
            ]
        )

    def _grader(self, name: str) -> Grader:
        grader = self._custom_grader if name == self._spec.grader else None
        grader = grader or find_grader(name)
        if grader is None:
            own = [self._spec.grader] if self._custom_grader else []
            raise InvalidArgument(
                f"unknown grader {name[:MAX_NAME_CHARACTERS]!r}; there are: {', '.join([*GRADERS, *own])}", "grader"
            )
        return grader

    def _item(self, one: pb.GradeItem) -> Item:
        return Item(
            one.response,
            one.label,
            one.truncated,
            self._spec.require_think,
            one.prompt,
            _metadata(one.metadata),
            one.group_id,
        )

    def _encode(self, grader: str, version: str, graded: Graded) -> pb.GradedItem:
        return pb.GradedItem(
            verdict=f"VERDICT_{graded.verdict.name}",
            value=reward_of(graded, self._spec),
            reason=f"VERDICT_REASON_{graded.reason.name}",
            seconds=graded.seconds,
            grader=grader,
            grader_version=version,
        )


def _metadata(text: str) -> dict[str, Any]:
    try:
        metadata = json.loads(text or "{}")
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        raise InvalidArgument("an item's metadata is not a JSON object", "items.metadata")
    return metadata


def reward_of(graded: Graded, spec: RewardSpec) -> float:
    """What a verdict is worth in this run."""
    if graded.verdict is not Verdict.SCORED:
        return getattr(spec.values, graded.verdict.value)
    return getattr(spec.values, graded.reason.value) if graded.value is None else graded.value


async def set_up(host: ServiceHost) -> None:
    """Start the workers and the servicer."""
    spec = host.spec.reward
    pools = Pools(spec)
    host.on_stop.append(pools.stop)
    host.board.checks["workers"] = lambda: "" if all(one.alive for one in pools.all) else "no grader process runs"
    host.board.details = lambda: {
        "workers": pools.built_in.alive,
        "workers_without_network": pools.built_in.cut_off,
        "custom_workers": pools.custom.alive if pools.custom else 0,
        "questions": sum(one.reserved for one in pools.all),
    }
    with host.board.waiting("grader processes to start"):
        await pools.start()
    host.serve(SERVICE_NAME, pb_grpc.add_RewardServiceServicer_to_server, RewardServicer(spec, pools))
