"""Keeps the engine known at the gateway, and its state there up to date."""

from __future__ import annotations

import asyncio
import contextlib

from flotilla.rollout_gateway.v1 import gateway_pb2, gateway_pb2_grpc
from services.common.board import StatusBoard
from services.common.errors import FlotillaError, NotFound
from services.common.logs import get_logger
from services.common.rpc import call, new_request_id, open_channel
from services.common.spec import RunSpec
from services.rollout_gateway.codec import version_to
from services.rollout_gateway.engine.state import ServingState

INTERVAL_S = 1.0
CALL_TIMEOUT_S = 2.0

log = get_logger(__name__)


class Heartbeat:
    """Registers and renews until it is cancelled."""

    def __init__(self, spec: RunSpec, index: int, worker_count: int, state: ServingState, board: StatusBoard) -> None:
        self._run_id = spec.run_id
        self._address = spec.services.rollout_gateway.grpc
        self._board = board
        self._state = state
        self._entry = gateway_pb2.Engine(
            engine_id=f"engine-{index}",
            incarnation=new_request_id(),
            address=spec.services.engines[index].grpc,
            worker_count=worker_count,
        )

    def entry(self) -> gateway_pb2.Engine:
        """The engine as it is now."""
        entry = gateway_pb2.Engine()
        entry.CopyFrom(self._entry)
        entry.state = _state(self._state)
        if self._state.version:
            entry.version.CopyFrom(version_to(self._state.version))
        return entry

    async def run(self) -> None:
        """Beat every second, and at once when something changes."""
        async with open_channel(self._address) as channel:
            stub = gateway_pb2_grpc.RolloutGatewayServiceStub(channel)
            registered, answers = False, True
            while True:
                self._state.changed.clear()
                try:
                    await (self._renew(stub) if registered else self._register(stub))
                    registered = answers = True
                except FlotillaError as error:
                    if registered and isinstance(error, NotFound):
                        registered = False
                        continue
                    if answers:
                        log.warning("the gateway does not answer", error=str(error))
                    answers = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._state.changed.wait()

    async def _register(self, stub: gateway_pb2_grpc.RolloutGatewayServiceAsyncStub) -> None:
        with self._board.waiting("the gateway, to register this engine"):
            request = gateway_pb2.RegisterEngineRequest(
                run_id=self._run_id, request_id=new_request_id(), engine=self.entry()
            )
            await call(stub.RegisterEngine, request, timeout_s=CALL_TIMEOUT_S)

    async def _renew(self, stub: gateway_pb2_grpc.RolloutGatewayServiceAsyncStub) -> None:
        request = gateway_pb2.RenewEngineRequest(run_id=self._run_id, request_id=new_request_id(), engine=self.entry())
        await call(stub.RenewEngine, request, timeout_s=CALL_TIMEOUT_S)


def _state(state: ServingState) -> gateway_pb2.EngineState:
    if state.version is None:
        return gateway_pb2.ENGINE_STATE_STALE
    return gateway_pb2.ENGINE_STATE_PAUSED if state.paused else gateway_pb2.ENGINE_STATE_SERVING
