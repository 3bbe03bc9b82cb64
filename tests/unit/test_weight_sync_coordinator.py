"""The coordinator against scripted peers: registry, gateway, one agent and engines are fakes behind real gRPC."""

# pyright: reportAbstractUsage=false

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from flotilla.buffer.v1 import registry_pb2, registry_pb2_grpc
from flotilla.rollout_gateway.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from flotilla.weight_sync.v1 import agent_pb2, agent_pb2_grpc, weight_sync_pb2
from services.common.board import StatusBoard
from services.common.errors import Aborted, FailedPrecondition, FlotillaError, NotFound, Unavailable
from services.common.rpc import bind_server, make_server
from services.common.spec import RunSpec
from services.weight_sync.coordinator import Coordinator, recovered_target
from services.weight_sync.peers import Peers
from services.weight_sync.records import PolicyVersion
from services.weight_sync.servicer import WeightSyncServicer
from tests.conftest import free_ports
from tests.weight_sync_peers import Gateway, Registry, proto

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
DIGEST = f"{7:032x}"
PUBLISHING, LIVE = registry_pb2.VERSION_STATE_PUBLISHING, registry_pb2.VERSION_STATE_LIVE
FAILED = registry_pb2.VERSION_STATE_FAILED
WAIT_S = 10.0


class Agent(agent_pb2_grpc.WeightAgentServiceServicer):
    def __init__(self) -> None:
        self.held = V0
        self.aborted = 0
        self.sent: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def WaitRead(self, request, context):
        one = agent_pb2.ShardSlice(name="a", full_shape=[4], begin=[0], shape=[4], dtype="float32", strides=[1])
        return agent_pb2.WaitReadResponse(
            read=True,
            version=proto(self.held),
            slices=[one],
            rendezvous_address="127.0.0.1:1",
            read_quantise_seconds=0.25,
        )

    async def RunTransfer(self, request, context):
        if (request.version.run_epoch, request.version.step) != (self.held.run_epoch, self.held.step):
            raise Aborted("not held")
        await self.gate.wait()
        self.sent.append(request.session_id)
        return agent_pb2.RunTransferResponse(digest=DIGEST, connect_seconds=0.125, wire_seconds=0.5)

    async def AbortTransfer(self, request, context):
        self.aborted += 1
        return agent_pb2.AbortTransferResponse()


class EngineScript(engine_pb2_grpc.EngineServiceServicer):
    """An engine; `failures` are raised by the named methods, one each time."""

    def __init__(self, parameter: str = "a") -> None:
        self.parameter = parameter
        self.digest = DIGEST
        self.failures: dict[str, list[FlotillaError]] = {}
        self.started: list[engine_pb2.StartWeightUpdateRequest] = []
        self.finished: list[str] = []
        self.aborted: list[str] = []

    def _maybe_fail(self, method: str) -> None:
        if waiting := self.failures.get(method):
            raise waiting.pop(0)

    async def GetParameterManifest(self, request, context):
        self._maybe_fail("GetParameterManifest")
        parameter = engine_pb2.ManifestParameter(name=self.parameter, shape=[4], dtype="float32")
        return engine_pb2.GetParameterManifestResponse(parameters=[parameter])

    async def StartWeightUpdate(self, request, context):
        self._maybe_fail("StartWeightUpdate")
        self.started.append(request)
        return engine_pb2.StartWeightUpdateResponse()

    async def ReceiveWeights(self, request, context):
        self._maybe_fail("ReceiveWeights")
        return engine_pb2.ReceiveWeightsResponse(digests=[self.digest], wire_seconds=0.5)

    async def FinishWeightUpdate(self, request, context):
        self._maybe_fail("FinishWeightUpdate")
        self.finished.append(request.session_id)
        return engine_pb2.FinishWeightUpdateResponse(load_seconds=0.1, pause_seconds=0.2)

    async def AbortWeightUpdate(self, request, context):
        self.aborted.append(request.session_id)
        return engine_pb2.AbortWeightUpdateResponse()


class World:
    """Servers of all peers, and coordinators over them."""

    def __init__(self, run_dir: Path) -> None:
        self.ports = free_ports(8)
        self.registry, self.gateway, self.agent = Registry(), Gateway(), Agent()
        self.engines: dict[str, EngineScript] = {}
        self.spec = make_spec(run_dir, self.ports)
        self._servers: list[grpc.aio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._peers: list[Peers] = []

    async def start(self) -> None:
        await self._serve(0, self.registry, registry_pb2_grpc.add_RunRegistryServiceServicer_to_server)
        await self._serve(1, self.gateway, gateway_pb2_grpc.add_RolloutGatewayServiceServicer_to_server)
        await self._serve(2, self.agent, agent_pb2_grpc.add_WeightAgentServiceServicer_to_server)

    async def engine(
        self, name: str, *, incarnation: str = "1", version: PolicyVersion | None = None, parameter: str = "a"
    ) -> EngineScript:
        """Serve and register an engine."""
        script = self.engines[name] = EngineScript(parameter)
        port = len(self._servers)
        await self._serve(port, script, engine_pb2_grpc.add_EngineServiceServicer_to_server)
        await self.list(name, port, incarnation, version)
        return script

    async def list(self, name: str, port: int, incarnation: str = "1", version: PolicyVersion | None = None) -> None:
        message = gateway_pb2.Engine(
            engine_id=name, incarnation=incarnation, address=f"127.0.0.1:{self.ports[port]}", worker_count=1
        )
        if version:
            message.version.CopyFrom(proto(version))
        await self.gateway.put(name, message)

    async def coordinator(self) -> Coordinator:
        """Start one; an earlier one is stopped, as by a crash."""
        await self.stop_coordinator()
        peers = Peers(self.spec.services)
        coordinator = Coordinator(self.spec, peers, StatusBoard("weight_sync"))
        await coordinator.recover()
        self._peers.append(peers)
        self._tasks = [asyncio.create_task(coordinator.watch_engines()), asyncio.create_task(coordinator.run())]
        return coordinator

    async def stop_coordinator(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peers in self._peers:
            await peers.close()
        self._tasks, self._peers = [], []

    async def stop(self) -> None:
        await self.stop_coordinator()
        for server in self._servers:
            await server.stop(None)

    async def until(self, reached: Callable[[], Any]) -> None:
        """Wait for a condition; a background task that failed fails the test."""
        async with asyncio.timeout(WAIT_S):
            while not reached():
                for task in self._tasks:
                    assert not task.done(), task.exception()
                await asyncio.sleep(0.005)

    async def until_recorded(self, version: PolicyVersion, state: int) -> None:
        await self.until(lambda: (version, state) in self.registry.records)

    def rows(self) -> list[dict[str, Any]]:
        path = self.spec.run_dir / "weight_sync.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def _serve(self, port: int, servicer: object, add: Callable[[Any, grpc.aio.Server], None]) -> None:
        server = make_server()
        add(servicer, server)
        bind_server(server, "127.0.0.1", self.ports[port])
        await server.start()
        self._servers.append(server)


def make_spec(run_dir: Path, ports: list[int]) -> RunSpec:
    def endpoint(port: int) -> dict[str, int]:
        return {"grpc_port": port, "http_port": 1}

    return RunSpec.model_validate(
        {
            "run_id": "test",
            "run_dir": run_dir,
            "model": {"hf_checkpoint": "unused"},
            "data": {"prompt_data": "unused"},
            "rollout": {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2},
            "weight_sync": {"session_timeout_s": 5},
            "services": {
                "buffer": endpoint(ports[0]),
                "rollout_gateway": endpoint(ports[1]),
                "weight_agents": [endpoint(ports[2])],
            },
        }
    )


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.start()
    yield made
    await made.stop()


async def test_a_version_goes_to_every_engine_and_then_live(world):
    one, two = await world.engine("e0"), await world.engine("e1")
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until_recorded(V0, LIVE)
    assert world.registry.records == [(V0, PUBLISHING), (V0, LIVE)]
    assert [(s.first_rank, s.world_size) for s in (one.started[0], two.started[0])] == [(1, 3), (2, 3)]
    assert one.finished == two.finished == world.agent.sent
    assert coordinator.status().settled
    last = world.registry.last
    assert last.digest == DIGEST and last.timings.wire_bytes == 16
    assert (last.timings.read_quantise_seconds, last.timings.wire_seconds) == (0.25, 0.5)
    assert last.timings.connect_seconds == 0.125
    assert (last.timings.load_seconds, last.timings.pause_seconds) == (0.1, 0.2)
    [row] = world.rows()
    assert row["engines"] == ["e0", "e1"] and row["receiver_digests"] == [DIGEST, DIGEST] and row["equal"]
    assert (row["run_epoch"], row["step"], row["wire_bytes"], row["plain_bytes"]) == (1, 0, 16, 16)


async def test_without_an_engine_nothing_is_live(world):
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until_recorded(V0, PUBLISHING)
    await asyncio.sleep(0.1)
    assert world.registry.records == [(V0, PUBLISHING)] and not coordinator.status().settled
    await world.engine("e0")
    await world.until_recorded(V0, LIVE)


async def test_publishing_is_idempotent_and_fenced(world):
    await world.engine("e0")
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until_recorded(V0, LIVE)
    coordinator.publish(V0)
    await asyncio.sleep(0.1)
    assert len(world.rows()) == 1
    world.agent.held = PolicyVersion(2, 0)
    coordinator.publish(PolicyVersion(2, 0))
    with pytest.raises(Aborted, match="old epoch"):
        coordinator.publish(PolicyVersion(1, 5))
    await world.until_recorded(PolicyVersion(2, 0), LIVE)


async def test_a_late_engine_is_brought_up_without_a_new_record(world):
    await world.engine("e0")
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until_recorded(V0, LIVE)
    late = await world.engine("e1")
    await world.until(lambda: late.finished)
    await world.until(lambda: coordinator.status().settled)
    assert world.registry.records == [(V0, PUBLISHING), (V0, LIVE)]
    assert world.rows()[-1]["engines"] == ["e1"]


async def test_an_engine_that_restarted_gets_the_version_again(world):
    script = await world.engine("e0")
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until_recorded(V0, LIVE)
    await world.list("e0", 3, incarnation="2")
    await world.until(lambda: len(script.finished) == 2)
    assert world.registry.records == [(V0, PUBLISHING), (V0, LIVE)]


@pytest.mark.parametrize(
    "method", ["GetParameterManifest", "StartWeightUpdate", "ReceiveWeights", "FinishWeightUpdate"]
)
async def test_whatever_fails_is_aborted_and_tried_again(world, method):
    good, bad = await world.engine("e0"), await world.engine("e1")
    bad.failures[method] = [Unavailable("gone"), FailedPrecondition("no")]
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until_recorded(V0, LIVE)
    status = coordinator.status()
    assert status.sessions == 3
    assert status.failures["e1"].count == 2 and status.failures["e1"].last_error == "no"
    assert len(world.rows()) == 1
    if method in ("StartWeightUpdate", "ReceiveWeights"):
        assert len(good.aborted) == len(bad.aborted) == world.agent.aborted == 2
    if method == "FinishWeightUpdate":
        assert len(good.finished) == 1, "an engine that took the version is left alone"
        assert not good.aborted and len(bad.aborted) == 2


async def test_another_digest_is_never_live(world):
    script = await world.engine("e0")
    script.digest = f"{8:032x}"
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until(lambda: coordinator.status().digest_mismatches >= 2)
    assert not script.finished and len(script.aborted) >= 1
    assert world.registry.records == [(V0, PUBLISHING)]
    assert not world.rows()[0]["equal"]
    script.digest = DIGEST
    await world.until_recorded(V0, LIVE)


async def test_a_newer_version_supersedes_one_on_its_way(world):
    script = await world.engine("e0")
    world.agent.gate.clear()
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until(lambda: script.started)
    world.agent.held = V1
    coordinator.publish(V1)
    await world.until(lambda: script.aborted == [script.started[0].session_id])
    world.agent.gate.set()
    await world.until_recorded(V1, LIVE)
    assert world.registry.records == [(V0, PUBLISHING), (V0, FAILED), (V1, PUBLISHING), (V1, LIVE)]
    assert len(script.finished) == 1


async def test_an_engine_that_leaves_ends_its_session(world):
    stays, leaves = await world.engine("e0"), await world.engine("e1")
    world.agent.gate.clear()
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until(lambda: leaves.started and stays.started)
    await world.gateway.put("e1", None)
    await world.until(lambda: len(stays.started) == 2)
    world.agent.gate.set()
    await world.until_recorded(V0, LIVE)
    assert not leaves.finished and world.rows()[0]["engines"] == ["e0"]


async def test_an_old_epoch_at_the_registry_drops_the_target(world):
    script = await world.engine("e0")
    coordinator = await world.coordinator()
    world.registry.answers = [Aborted("run_epoch 1 is old")]
    coordinator.publish(V0)
    await world.until(lambda: coordinator.status().target is None)
    assert not script.started
    with pytest.raises(Aborted):
        coordinator.publish(V0)


async def test_a_registry_that_is_away_for_a_moment_costs_nothing(world):
    script = await world.engine("e0")
    coordinator = await world.coordinator()
    world.registry.answers = [Unavailable("redis"), Unavailable("redis")]
    coordinator.publish(V0)
    await world.until_recorded(V0, LIVE)
    assert len(script.finished) == 1


@pytest.mark.parametrize("state", [PUBLISHING, LIVE])
async def test_a_restart_takes_up_the_newest_version(world, state):
    world.registry.versions = [registry_pb2.Version(version=proto(V0), state=state)]
    behind, served = await world.engine("e0"), await world.engine("e1", version=V0)
    coordinator = await world.coordinator()
    await world.until(lambda: coordinator.status().settled)
    assert len(behind.finished) == 1 and not served.started
    if state == PUBLISHING:
        await world.until_recorded(V0, LIVE)
    else:
        assert not world.registry.records, "it is live already"


async def test_a_coordinator_that_crashed_in_a_session_begins_anew(world):
    script = await world.engine("e0")
    world.agent.gate.clear()
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until(lambda: script.started)
    world.registry.versions = [registry_pb2.Version(version=proto(V0), state=PUBLISHING)]
    await world.coordinator()
    world.agent.gate.set()
    await world.until_recorded(V0, LIVE)
    assert len(script.finished) == 1


async def test_an_engine_that_wants_more_than_the_trainer_has_is_named(world):
    await world.engine("e0", parameter="lm_head.weight")
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until(lambda: coordinator.status().failures)
    assert "lm_head.weight" in coordinator.status().failures["e0"].last_error


async def test_an_agent_that_went_on_is_no_source(world):
    script = await world.engine("e0")
    world.agent.held = V1
    coordinator = await world.coordinator()
    coordinator.publish(V0)
    await world.until(lambda: coordinator.status().failures)
    assert not script.started
    coordinator.publish(V1)
    await world.until_recorded(V1, LIVE)


def version_of(version: PolicyVersion, state: registry_pb2.VersionState) -> registry_pb2.Version:
    return registry_pb2.Version(version=proto(version), state=state)


def test_what_a_restart_takes_up():
    retired = version_of(V0, registry_pb2.VERSION_STATE_RETIRED)
    live, failed = version_of(V1, LIVE), version_of(PolicyVersion(1, 2), FAILED)
    target = recovered_target([failed, live, retired], 1, 0.0)
    assert target and target.version == V1 and target.recorded == LIVE
    assert recovered_target([failed, live], 2, 0.0) is None, "versions of an old epoch are not brought"
    assert recovered_target([], 1, 0.0) is None


async def test_the_servicer_says_how_it_stands(world):
    script = await world.engine("e0")
    script.failures["StartWeightUpdate"] = [Unavailable("busy")]
    coordinator = await world.coordinator()
    servicer = WeightSyncServicer("test", coordinator)
    with pytest.raises(NotFound, match="no transfer"):
        await servicer.GetTransferPlan(weight_sync_pb2.GetTransferPlanRequest(run_id="test"), None)
    with pytest.raises(NotFound, match="serves run test"):
        await servicer.GetSyncStatus(weight_sync_pb2.GetSyncStatusRequest(run_id="other"), None)
    publish = weight_sync_pb2.PublishVersionRequest(run_id="test", version=proto(V0))
    await servicer.PublishVersion(publish, None)
    await world.until_recorded(V0, LIVE)
    status = await servicer.GetSyncStatus(weight_sync_pb2.GetSyncStatusRequest(run_id="test"), None)
    assert status.target == proto(V0) and status.settled and status.sessions == 2
    [engine] = status.engines
    assert (engine.engine_id, engine.version, engine.failures, engine.last_error) == ("e0", proto(V0), 1, "busy")
    plan = await servicer.GetTransferPlan(weight_sync_pb2.GetTransferPlanRequest(run_id="test"), None)
    assert plan.wire_bytes == 16 and [t.name for bucket in plan.buckets for t in bucket.tensors] == ["a"]
