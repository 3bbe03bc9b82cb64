"""One engine process; also what vLLM's processes import first, as `__mp_main__`."""

from __future__ import annotations

import asyncio
from typing import Any

from flotilla.rollout_gateway.v1 import engine_pb2_grpc
from services.common.service import ServiceHost, load_spec_or_exit, run_process, service_parser
from services.rollout_gateway.engine.children import die_with_parent_if_spawned
from services.rollout_gateway.engine.generation import Generations
from services.rollout_gateway.engine.heartbeat import Heartbeat
from services.rollout_gateway.engine.servicer import EngineServicer
from services.rollout_gateway.engine.state import ServingState
from services.rollout_gateway.engine.updates import WeightUpdates
from services.rollout_gateway.engine.vllm_engine import EngineDied, VllmEngine

SERVICE_NAME = "flotilla.rollout_gateway.v1.EngineService"
WORKER_EXTENSION = "services.weight_sync.receiver.WeightReceiver"


async def setup(host: ServiceHost, index: int, worker_extension: str) -> None:
    """Load vLLM and serve it."""
    with host.board.waiting("vLLM to load the model"):
        engine = await VllmEngine.start(host.spec, worker_extension)
    state = ServingState(engine)
    generations = Generations(engine, host.spec.engine.max_model_len)
    updates = WeightUpdates(engine, state, host.fail)
    servicer = EngineServicer(host.spec.run_id, engine, generations, state, updates, host.stopping)
    host.serve(SERVICE_NAME, engine_pb2_grpc.add_EngineServiceServicer_to_server, servicer)
    host.board.checks["vllm"] = lambda: "vLLM has failed" if engine.is_dead() else ""
    host.board.details = lambda: _details(generations, state, updates)
    host.on_stop.append(lambda: asyncio.to_thread(engine.stop))
    host.spawn(_fail_with(engine), "vllm")
    host.spawn(_abort_at_the_end(generations), "abort")
    host.spawn(Heartbeat(host.spec, index, engine.worker_count, state, host.board).run(), "heartbeat")


async def _fail_with(engine: VllmEngine) -> None:
    await engine.died()
    raise EngineDied("vLLM's engine core has failed; its log says why")


async def _abort_at_the_end(generations: Generations) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await generations.abort(())


def _details(generations: Generations, state: ServingState, updates: WeightUpdates) -> dict[str, Any]:
    return {
        "version": str(state.version or ""),
        "paused": state.paused,
        "running_samples": generations.running_samples,
        "generated_tokens": generations.generated_tokens,
        "weight_updates": updates.finished,
    }


def main(worker_extension: str = WORKER_EXTENSION) -> None:
    """Run one engine until a signal; `worker_extension` is what receives weights in vLLM's workers."""
    parser = service_parser("rollout_gateway.engine")
    parser.add_argument("--index", type=int, default=0, help="which of services.engines this process is")
    args = parser.parse_args()
    spec = load_spec_or_exit(args)
    if not 0 <= args.index < len(spec.services.engines):
        parser.error(f"--index {args.index}: the run has {len(spec.services.engines)} engines")
    run_process(
        f"engine-{args.index}",
        spec,
        lambda host: setup(host, args.index, worker_extension),
        spec.services.engines[args.index],
    )


die_with_parent_if_spawned(__name__)
if __name__ == "__main__":
    main()
