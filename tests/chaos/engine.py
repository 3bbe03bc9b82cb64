"""`python -m tests.chaos.engine --run RUN.toml`: an engine without a model, for tests.

Its answers are those of `tests.chaos.responses`, a few tokens every few milliseconds. Contract, streams, heartbeat and
serving state are those of the real engine; only vLLM is replaced. No weights move: it takes every version as soon as
the registry names it, while PUBLISHING, which is when weights would have come. It ends with an error when it is asked
to continue a response that it would not have given.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

from flotilla.buffer.v1 import registry_pb2, registry_pb2_grpc
from flotilla.rollout_gateway.v1 import engine_pb2_grpc
from services.common.errors import FlotillaError
from services.common.rpc import call, open_channel
from services.common.service import ServiceHost, run_process
from services.common.spec import load_run
from services.rollout_gateway.codec import version_from
from services.rollout_gateway.engine.generation import SEED_STEP, Generations
from services.rollout_gateway.engine.heartbeat import Heartbeat
from services.rollout_gateway.engine.servicer import EngineServicer
from services.rollout_gateway.engine.state import Hold, ServingState
from services.rollout_gateway.engine.updates import WeightUpdates
from services.rollout_gateway.engine.vllm_engine import Delta, Finish, Sampling, VllmEngine
from services.rollout_gateway.spans import Span, Version
from tests.chaos.responses import answer_to, respond, split_prompt

SERVICE_NAME = "flotilla.rollout_gateway.v1.EngineService"
PORTION_TOKENS, PORTION_S = 4, 0.01
"""Tokens that come together, and how long they take."""
LOOK_EVERY_S = 0.05
CALL_TIMEOUT_S = 2.0
SERVED = (registry_pb2.VERSION_STATE_PUBLISHING, registry_pb2.VERSION_STATE_LIVE)


class DeterministicEngine(VllmEngine):
    """Takes the place of vLLM."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._version = Version(0, 0)
        self._going = asyncio.Event()
        self._going.set()
        self._aborted: set[str] = set()
        self.worker_count = 1

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> AsyncIterator[Delta]:
        """Portions of the response, each of the version that is there when it goes out."""
        prompt, done = split_prompt(token_ids)
        begin = position = len(done)
        response = respond(sampling.seed - begin * SEED_STEP, answer_to(prompt), begin + sampling.max_tokens)
        if list(done) != response.token_ids[:begin]:
            self._host.fail(AssertionError(f"{request_id} goes on from tokens that this engine never gave"))
        while position < len(response.token_ids):
            await asyncio.sleep(PORTION_S)
            await self._going.wait()
            if request_id in self._aborted:
                yield Delta((), (), [], Finish.ABORTED)
                return
            new = slice(position, min(position + PORTION_TOKENS, len(response.token_ids)))
            last = Finish.LENGTH if response.is_truncated else Finish.STOP
            span = Span(position - begin, new.stop - begin, self._version)
            position = new.stop
            finish = last if position == len(response.token_ids) else None
            yield Delta(response.token_ids[new], response.log_probs[new], [span], finish)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End responses."""
        self._aborted |= set(request_ids)

    async def pause(self) -> None:
        """Freeze."""
        self._going.clear()

    async def resume(self) -> None:
        """Go on."""
        self._going.set()

    async def take_version(self, version: Version) -> None:
        """Later tokens bear the version."""
        self._version = version


async def setup(host: ServiceHost, index: int) -> None:
    """Serve."""
    engine = DeterministicEngine(host)
    state = ServingState(engine)
    generations = Generations(engine, host.spec.engine.max_model_len)
    updates = WeightUpdates(engine, state, host.fail)
    servicer = EngineServicer(host.spec.run_id, engine, generations, state, updates, host.stopping)
    host.serve(SERVICE_NAME, engine_pb2_grpc.add_EngineServiceServicer_to_server, servicer)
    host.spawn(_follow_versions(host, state), "versions")
    host.spawn(Heartbeat(host.spec, index, engine.worker_count, state, host.board).run(), "heartbeat")


async def _follow_versions(host: ServiceHost, state: ServingState) -> None:
    request = registry_pb2.ListVersionsRequest(run_id=host.spec.run_id, page_size=1)
    async with open_channel(host.spec.services.buffer.grpc) as channel:
        stub = registry_pb2_grpc.RunRegistryServiceStub(channel)
        while True:
            try:
                found = (await call(stub.ListVersions, request, timeout_s=CALL_TIMEOUT_S)).versions
            except FlotillaError:  # the buffer is away
                found = []
            for one in found:
                if one.state in SERVED and version_from(one.version) != state.version:
                    await state.pause(Hold.WEIGHT_UPDATE)
                    await state.take_version(version_from(one.version))
                    await state.resume(Hold.WEIGHT_UPDATE)
            await asyncio.sleep(LOOK_EVERY_S)


def main() -> None:
    """Run until a signal."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.engine")
    parser.add_argument("--run", type=Path, required=True, help="run spec (TOML)")
    parser.add_argument("--index", type=int, default=0, help="which of services.engines this process is")
    args = parser.parse_args()
    spec = load_run(args.run)
    endpoint = spec.services.engines[args.index]
    run_process(f"engine-{args.index}", spec, lambda host: setup(host, args.index), endpoint)


if __name__ == "__main__":
    main()
