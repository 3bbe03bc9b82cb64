"""Hands this rank's weights to the weight agent beside it.

Invariant: the memory that the agent reads changes only under the lock, and only after the agent that lives now has read
what lies there. So an agent that restarts at any moment reads either a whole version or nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc

from flotilla.common.v1 import common_pb2
from flotilla.weight_sync.v1 import agent_pb2, agent_pb2_grpc
from services.common.board import StatusBoard
from services.common.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from services.common.logs import get_logger
from services.common.rpc import call, duration, new_request_id
from services.common.service import Backoff
from services.trainer.codec import registration_to_proto
from services.trainer.export import CudaWeights, SharedWeights
from services.trainer.insist import ATTEMPT_S, HEARTBEAT_S, insist

READ_DEADLINE_S = 600.0
"""An agent that lives but has not read a version by then never will."""

log = get_logger(__name__)


class Exporter:
    """The weight agent beside a rank. Used from one event loop."""

    def __init__(
        self,
        run_id: str,
        rank: int,
        board: StatusBoard,
        agent: grpc.aio.Channel,
        weights: SharedWeights | CudaWeights,
        write: Callable[[], Awaitable[None]],
    ) -> None:
        """Nothing is exported yet.

        Args:
            run_id: Of the run.
            rank: Of this process.
            board: Shows what it waits for.
            agent: To the weight agent.
            weights: The memory that the agent reads.
            write: Copies the weights as they are now to that memory.
        """
        self._run_id, self._rank, self._board = run_id, rank, board
        self._agent = agent_pb2_grpc.WeightAgentServiceStub(agent)
        self._weights, self._write = weights, write
        self._lock = asyncio.Lock()
        self._exported: common_pb2.PolicyVersion | None = None
        self._told = ""
        """Incarnation of the agent that knows of the exported version."""

    async def export(self, version: common_pb2.PolicyVersion) -> None:
        """Export the weights as a version, and see them read.

        Raises:
            Aborted: Another trainer runs.
            DeadlineExceeded, Unavailable: The agent stayed away, or does not read.
        """
        async with self._lock:
            if self._exported is not None:
                await self._until_read(self._exported)
            await self._write()
            self._exported, self._told = version, ""
            await self._until_read(version)

    async def beat(self) -> None:
        """Tell a restarted agent of the version, for the life of the process. Aborted if another trainer runs."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._tell_agent()
            except (Unavailable, DeadlineExceeded, FailedPrecondition) as error:
                log.info("the weight agent is away; the heartbeat will tell it later", error=str(error))

    async def _tell_agent(self) -> None:
        async with self._lock:
            if self._exported is None:
                return
            request = agent_pb2.WaitReadRequest(run_id=self._run_id)
            answer = await call(self._agent.WaitRead, request, timeout_s=ATTEMPT_S)
            if answer.incarnation != self._told:
                await self._announce(self._exported)

    async def _until_read(self, version: common_pb2.PolicyVersion) -> None:
        """Return once the agent that lives now has read the version; tell it as often as it restarts."""
        deadline, backoff = time.monotonic() + READ_DEADLINE_S, Backoff()
        # Short polls: an agent that has restarted cannot say that it waits for a version it has not been told of.
        request = agent_pb2.WaitReadRequest(run_id=self._run_id, version=version, wait_timeout=duration(HEARTBEAT_S))
        while time.monotonic() < deadline:
            try:
                if not self._told:
                    await self._announce(version)
                what = f"the weight agent to read version {version.run_epoch}.{version.step}"
                answer = await insist(self._board, what, self._agent.WaitRead, request, poll_s=HEARTBEAT_S)
            except FailedPrecondition as error:  # it restarted between two calls
                log.info("the weight agent must be told again", error=str(error))
                self._told = ""
                await backoff.wait()
                continue
            if answer.incarnation != self._told:
                self._told = ""
            elif answer.read:
                return
        raise DeadlineExceeded(f"the weight agent did not read version {version.step} within {READ_DEADLINE_S:.0f} s")

    async def _announce(self, version: common_pb2.PolicyVersion) -> None:
        register = registration_to_proto(self._weights)
        register.run_id, register.request_id, register.rank = self._run_id, new_request_id(), self._rank
        announce = agent_pb2.AnnounceVersionRequest(run_id=self._run_id, request_id=new_request_id(), version=version)
        await insist(self._board, "the weight agent", self._agent.RegisterShards, register)
        answer = await insist(self._board, "the weight agent", self._agent.AnnounceVersion, announce)
        self._told = answer.incarnation
