"""The gateway's own contract over gRPC. Buffer and engines are scripted servers (gateway_peers.py)."""

from __future__ import annotations

import asyncio

import pytest

from flotilla.common.v1 import common_pb2
from flotilla.rollout_gateway.v1 import gateway_pb2
from services.common.errors import InvalidArgument, NotFound, Unavailable
from services.common.rpc import call, duration
from tests.unit.gateway_peers import ScriptedEngine, engine_message, gateway, make_lease, until


def by_hand(**overrides) -> gateway_pb2.GenerateRequest:
    fields = {
        "run_id": "r",
        "request_id": "q",
        "prompt_token_ids": [1],
        "sampling_params": common_pb2.SamplingParams(temperature=1, top_p=1, top_k=-1, max_response_tokens=16),
        "sample_count": 2,
        "seed": 7,
    }
    return gateway_pb2.GenerateRequest(**fields | overrides)


async def test_engines_register_renew_and_are_listed():
    async with gateway(works=False) as world:
        renewal = gateway_pb2.RenewEngineRequest(run_id="r", engine=engine_message())
        with pytest.raises(NotFound):
            await call(world.stub.RenewEngine, renewal, timeout_s=5)
        registration = gateway_pb2.RegisterEngineRequest(run_id="r", engine=engine_message())
        answer = await call(world.stub.RegisterEngine, registration, timeout_s=5)
        assert answer.ttl.seconds > 0
        await call(world.stub.RenewEngine, renewal, timeout_s=5)
        listed = await call(world.stub.ListEngines, gateway_pb2.ListEnginesRequest(run_id="r"), timeout_s=5)
        assert list(listed.engines) == [engine_message()]


async def test_list_engines_waits_for_a_change():
    async with gateway(works=False) as world:
        known = await call(world.stub.ListEngines, gateway_pb2.ListEnginesRequest(run_id="r"), timeout_s=5)
        request = gateway_pb2.ListEnginesRequest(run_id="r", known_revision=known.revision, wait_timeout=duration(5))
        polling = asyncio.ensure_future(call(world.stub.ListEngines, request, timeout_s=9))
        await asyncio.sleep(0.1)
        assert not polling.done()
        registration = gateway_pb2.RegisterEngineRequest(run_id="r", engine=engine_message())
        await call(world.stub.RegisterEngine, registration, timeout_s=5)
        changed = await asyncio.wait_for(polling, 2)
        assert changed.revision != known.revision
        assert len(changed.engines) == 1


async def test_list_engines_answers_unchanged_after_its_wait_and_at_a_stop():
    async with gateway(works=False) as world:
        known = await call(world.stub.ListEngines, gateway_pb2.ListEnginesRequest(run_id="r"), timeout_s=5)
        request = gateway_pb2.ListEnginesRequest(run_id="r", known_revision=known.revision, wait_timeout=duration(0.1))
        assert (await call(world.stub.ListEngines, request, timeout_s=2)).revision == known.revision
        request.wait_timeout.CopyFrom(duration(30))
        polling = asyncio.ensure_future(call(world.stub.ListEngines, request, timeout_s=40))
        await asyncio.sleep(0.1)
        world.stopping.set()
        world.pool.notify()
        assert (await asyncio.wait_for(polling, 2)).revision == known.revision


async def test_generate_by_hand():
    async with gateway(works=False) as world:
        with pytest.raises(Unavailable):
            await call(world.stub.Generate, by_hand(), timeout_s=5)
        engine = ScriptedEngine(length=2)
        await world.add_engine(engine)
        samples = (await call(world.stub.Generate, by_hand(), timeout_s=5)).samples
        assert [list(sample.response_token_ids) for sample in samples] == [[100, 101]] * 2
        assert [one.seed for one in engine.requests[0].samples] == [7, 8]


@pytest.mark.parametrize("wrong", [{"prompt_token_ids": []}, {"sample_count": 0}])
async def test_generate_refuses_what_is_malformed(wrong):
    async with gateway(works=False) as world:
        with pytest.raises(InvalidArgument):
            await call(world.stub.Generate, by_hand(**wrong), timeout_s=5)


async def test_other_run_is_not_found():
    async with gateway(works=False) as world:
        with pytest.raises(NotFound):
            await call(world.stub.GetGatewayStats, gateway_pb2.GetGatewayStatsRequest(run_id="x"), timeout_s=5)


async def test_concurrency_pause_abort_and_stats():
    async with gateway() as world:
        engine = ScriptedEngine(length=4)
        engine.hold_at = 2
        await world.add_engine(engine)
        world.buffer.add(make_lease())
        await until(lambda: world.generator.generated_tokens == 4)
        await call(
            world.stub.SetConcurrency,
            gateway_pb2.SetConcurrencyRequest(run_id="r", server_concurrency=7),
            timeout_s=5,
        )
        await call(world.stub.PauseGeneration, gateway_pb2.PauseGenerationRequest(run_id="r"), timeout_s=5)
        stats = await call(world.stub.GetGatewayStats, gateway_pb2.GetGatewayStatsRequest(run_id="r"), timeout_s=5)
        assert (stats.running_groups, stats.generated_tokens, stats.paused) == (1, 4, True)
        assert [(load.running_samples, load.server_concurrency) for load in stats.engines] == [(2, 7)]
        abort = gateway_pb2.AbortGenerationsRequest(run_id="r")
        assert (await call(world.stub.AbortGenerations, abort, timeout_s=5)).aborted_count == 1
        await until(lambda: len(world.buffer.releases) == 1)
        await call(world.stub.ResumeGeneration, gateway_pb2.ResumeGenerationRequest(run_id="r"), timeout_s=5)
        assert not world.work.paused
        with pytest.raises(InvalidArgument):
            request = gateway_pb2.SetConcurrencyRequest(run_id="r", server_concurrency=0)
            await call(world.stub.SetConcurrency, request, timeout_s=5)
