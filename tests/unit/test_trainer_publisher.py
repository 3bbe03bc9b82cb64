"""How versions reach agent and coordinator when these restart at bad moments.

Agent and coordinator are fakes (tests/trainer_peers.py) behind real gRPC; the weights are a few bytes in a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from flotilla.common.v1 import common_pb2
from services.common.board import StatusBoard
from services.common.errors import Aborted
from services.common.rpc import open_channel
from services.trainer import exporter, publisher
from services.trainer.export import SharedWeights
from services.trainer.exporter import Exporter
from services.trainer.publisher import Publisher
from tests.conftest import free_ports
from tests.trainer_peers import Peers, serve_peers


class Weights:
    """Four bytes that say which version they are."""

    def __init__(self, path: Path) -> None:
        self.path, self.size_bytes, self.slices = path, 4, []
        self.count = 0

    async def write(self) -> None:
        self.path.write_bytes(b"%04d" % self.count)
        self.count += 1


class Stage:
    def __init__(self, peers: Peers, weights: Weights, exporter: Exporter, publisher: Publisher) -> None:
        self.peers, self.weights, self.exporter, self.publisher = peers, weights, exporter, publisher

    async def publish(self, step: int) -> None:
        version = common_pb2.PolicyVersion(run_epoch=3, step=step)
        await self.exporter.export(version)
        await self.publisher.publish(version)

    async def beat(self) -> None:
        await asyncio.gather(self.exporter.beat(), self.publisher.beat())


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    names = ["buffer", "agent", "weight_sync"]
    ports = dict(zip(names, free_ports(3), strict=True))
    peers, weights = Peers(num_rollout=0), Weights(tmp_path / "memory")
    servers = await serve_peers(peers, ports)
    agent, coordinator = (open_channel(f"127.0.0.1:{ports[name]}") for name in ("agent", "weight_sync"))
    board, shared = StatusBoard("trainer"), cast(SharedWeights, weights)
    exporter = Exporter("run", 0, board, agent, shared, weights.write)
    yield Stage(peers, weights, exporter, Publisher("run", board, coordinator))
    await asyncio.gather(agent.close(), coordinator.close(), *(server.stop(None) for server in servers))


async def test_versions_are_read_whole_and_then_published(stage: Stage) -> None:
    for step in (0, 1, 2):
        await stage.publish(step)
    assert stage.peers.memory == {(3, 0): b"0000", (3, 1): b"0001", (3, 2): b"0002"}
    assert stage.peers.published == [(3, 0), (3, 1), (3, 2)]


async def test_an_agent_that_restarted_reads_the_old_version_before_the_memory_changes(stage: Stage) -> None:
    await stage.publish(0)
    stage.peers.memory.clear()
    stage.peers.restart_agent()
    await stage.publish(1)
    assert stage.peers.memory == {(3, 0): b"0000", (3, 1): b"0001"}


@pytest.mark.parametrize("moment", ["before_announce", "after_announce"])
async def test_an_agent_that_restarts_while_it_is_told_is_told_again(stage: Stage, moment: str) -> None:
    """Before: it knows of no memory, and says so. After: the one that read the version is gone."""

    def restart_once() -> None:
        setattr(stage.peers, moment, None)
        stage.peers.restart_agent()

    setattr(stage.peers, moment, restart_once)
    await stage.publish(0)
    assert len(set(stage.peers.registrations)) == 2
    assert stage.peers.held is not None
    assert stage.peers.published == [(3, 0)]


async def test_the_heartbeat_tells_whoever_restarted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(exporter, "HEARTBEAT_S", 0.02)
    beating = asyncio.create_task(stage.beat())
    await asyncio.sleep(0.1)
    assert stage.peers.registrations == [], "there is nothing to tell yet"
    await stage.publish(0)
    stage.peers.restart_agent()
    stage.peers.published.clear()
    await stage.peers.until(lambda: stage.peers.held and stage.peers.published, 5)
    told = len(stage.peers.registrations)
    await asyncio.sleep(0.1)
    assert len(stage.peers.registrations) == told, "an agent that knows is left alone"
    assert not beating.done()
    beating.cancel()


async def test_the_heartbeat_ends_when_another_trainer_runs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(exporter, "HEARTBEAT_S", 0.02)
    await stage.publish(0)

    stage.peers.refuse_publish = "epoch 3 is old"
    with pytest.raises(Aborted):
        await asyncio.wait_for(stage.beat(), 5)


async def test_an_agent_that_does_not_read_is_an_error(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget() -> None:
        stage.peers.held = None

    stage.peers.after_announce = forget
    monkeypatch.setattr(exporter, "READ_DEADLINE_S", 0.2)
    with pytest.raises(TimeoutError, match="did not read version 0"):
        await stage.publish(0)
    assert stage.peers.published == []
