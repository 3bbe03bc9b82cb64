"""`python -m services.rollout_gateway --run RUN.toml`."""

from __future__ import annotations

import asyncio
from typing import Any

from flotilla.rollout_gateway.v1 import gateway_pb2_grpc
from services.common.rpc import open_channel
from services.common.service import ServiceHost, run_service
from services.rollout_gateway.generator import Generator
from services.rollout_gateway.pool import EnginePool
from services.rollout_gateway.servicer import GatewayServicer
from services.rollout_gateway.work import WorkLoop

SERVICE_NAME = "flotilla.rollout_gateway.v1.RolloutGatewayService"


async def setup(host: ServiceHost) -> None:
    """Serve engines and work for the buffer."""
    spec = host.spec
    channel = open_channel(spec.services.buffer.grpc)
    host.on_stop.append(channel.close)
    pool = EnginePool(spec.engine.server_concurrency, host.board)
    generator = Generator(spec.run_id, pool)
    work = WorkLoop(spec, channel, pool, generator, host.board)
    servicer = GatewayServicer(spec.run_id, pool, generator, work, host.stopping)
    host.serve(SERVICE_NAME, gateway_pb2_grpc.add_RolloutGatewayServiceServicer_to_server, servicer)
    host.board.details = lambda: _details(pool, generator, work)
    host.spawn(pool.expire(), "expire")
    host.spawn(work.run(), "work")
    host.spawn(_wake_at_stop(host.stopping, pool), "wake")


async def _wake_at_stop(stopping: asyncio.Event, pool: EnginePool) -> None:
    """End long polls at the first signal."""
    try:
        await stopping.wait()
    finally:
        pool.notify()


def _details(pool: EnginePool, generator: Generator, work: WorkLoop) -> dict[str, Any]:
    return {
        "engines": {
            engine.engine_id: {
                "state": engine.state.value,
                "version": str(engine.version or ""),
                "running_samples": pool.router.load(engine),
            }
            for engine in pool.engines()
        },
        "running_groups": work.running_groups,
        "finished_samples": generator.finished_samples,
        "generated_tokens": generator.generated_tokens,
        "lost_leases": work.lost_leases,
        "paused": work.paused,
    }


if __name__ == "__main__":
    run_service("rollout_gateway", setup, lambda spec: spec.services.rollout_gateway)
