"""How work on leases is stopped. Buffer and engines are scripted servers (gateway_peers.py); the gateway is real."""

from __future__ import annotations

import asyncio

import pytest

from flotilla.buffer.v1 import buffer_pb2
from services.rollout_gateway import buffer_client, generator
from tests.unit.gateway_peers import V2, ScriptedEngine, World, gateway, make_lease, until


async def held_at_two(world: World, *groups: str, **script: int) -> ScriptedEngine:
    """An engine that holds groups of two samples after two tokens each; `script` sets fields of it."""
    engine = ScriptedEngine(length=8)
    engine.hold_at = 2
    for name, value in script.items():
        setattr(engine, name, value)
    await world.add_engine(engine)
    for group_id in groups:
        world.buffer.add(make_lease(group_id, ttl_s=60))
    await until(lambda: world.generator.generated_tokens == 4 * len(groups))
    return engine


async def test_watch_stops_a_lease_at_once_and_no_token_of_it_is_lost():
    async with gateway() as world:
        engine = await held_at_two(world, "g0", "g1", unflushed=3)
        world.buffer.stop("g1")
        await until(lambda: len(world.buffer.releases) == 1)
        assert [list(abort.group_ids) for abort in engine.aborts] == [["g1"]]
        assert world.buffer.releases[0].error == ""
        assert world.buffer.saved("g1") == {0: [100, 101, 102, 103, 104], 1: [100, 101, 102, 103, 104]}
        await until(lambda: world.work.running_groups == 1)
        assert (engine.dropped, world.buffer.renewals, world.work.lost_leases) == (0, 0, 0)
        engine.go.set()
        await until(lambda: len(world.buffer.submits) == 1)
        assert world.buffer.submits[0].group_id == "g0"


async def test_samples_that_finish_while_they_are_stopped_are_submitted():
    async with gateway() as world:
        await held_at_two(world, "g0", unflushed=6)
        world.buffer.stop("g0")
        await until(lambda: len(world.buffer.submitted) == 2)
        await until(lambda: world.work.running_groups == 0)
        assert not world.buffer.releases


async def test_renewal_stops_what_the_watch_does_not():
    async with gateway() as world:
        engine = ScriptedEngine(length=8)
        engine.hold_at, engine.unflushed = 2, 1
        await world.add_engine(engine)
        world.buffer.stop_reason = buffer_pb2.STOP_REASON_SEALED
        world.buffer.add(make_lease())
        await until(lambda: len(world.buffer.releases) == 1)
        assert [fragment.begin for fragment in world.buffer.releases[0].progress] == [2, 2]
        assert world.buffer.saved() == {0: [100, 101, 102], 1: [100, 101, 102]}


async def test_group_that_waits_for_an_engine_is_stopped_at_once():
    async with gateway() as world:
        engine = ScriptedEngine()
        await world.add_engine(engine)
        world.buffer.add(make_lease(ttl_s=60, required=V2))
        await until(lambda: world.work.running_groups == 1)
        world.buffer.stop("g0", buffer_pb2.STOP_REASON_VERSION_GONE)
        await until(lambda: len(world.buffer.releases) == 1)
        assert not world.buffer.releases[0].progress
        assert not engine.aborts


async def test_drained_gateway_gives_everything_back_and_stays_up():
    async with gateway() as world:
        await held_at_two(world, "g0", "g1")
        for group_id in ("g0", "g1"):
            world.buffer.stop(group_id, buffer_pb2.STOP_REASON_DRAINING)
        await until(lambda: len(world.buffer.releases) == 2)
        await until(lambda: world.work.running_groups == 0)
        assert {one.worker_id for one in world.buffer.watches} == {one.worker_id for one in world.buffer.lease_requests}
        assert world.buffer.saved("g0") == world.buffer.saved("g1") == {0: [100, 101], 1: [100, 101]}


async def test_watch_that_breaks_is_opened_again_and_hears_what_was_said_meanwhile():
    async with gateway() as world:
        await held_at_two(world, "g0")
        world.buffer.away = True
        world.buffer.break_watch.set()
        await asyncio.sleep(0.3)
        world.buffer.stop("g0")
        assert world.work.running_groups == 1
        world.buffer.away = False
        await until(lambda: len(world.buffer.releases) == 1)
        assert len(world.buffer.watches) == 2


async def test_watch_is_opened_again_after_its_deadline(monkeypatch):
    monkeypatch.setattr(buffer_client, "WATCH_S", 0.1)
    async with gateway() as world:
        await until(lambda: len(world.buffer.watches) >= 3)


async def test_engine_that_does_not_abort_is_left_after_a_while(monkeypatch):
    monkeypatch.setattr(generator, "DRAIN_S", 0.1)
    async with gateway() as world:
        engine = await held_at_two(world, "g0", ignores_aborts=True)
        world.buffer.stop("g0")
        await until(lambda: len(world.buffer.releases) == 1)
        assert world.buffer.saved() == {0: [100, 101], 1: [100, 101]}
        await until(lambda: engine.dropped == 1)


@pytest.mark.parametrize(
    "stop", [buffer_pb2.Stop(group_id="g0", lease_token=b"of an earlier lease"), buffer_pb2.Stop()]
)
async def test_stop_of_another_lease_stops_nothing(stop):
    async with gateway() as world:
        engine = await held_at_two(world, "g0")
        world.buffer.stops.append(stop)
        world.buffer.stop("g9")
        await asyncio.sleep(0.1)
        engine.go.set()
        await until(lambda: len(world.buffer.submitted) == 2)
        assert not engine.aborts
