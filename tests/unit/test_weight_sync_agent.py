"""The agent's memory and holder over real shared memory; one test slows reading down to catch it in the middle."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flotilla.weight_sync.v1 import agent_pb2
from services.common.errors import Aborted, FailedPrecondition, InvalidArgument
from services.weight_sync.agent import held as held_module
from services.weight_sync.agent.held import Held
from services.weight_sync.agent.holder import Holder
from services.weight_sync.agent.memory import map_memory, read_tensors
from services.weight_sync.agent.service import map_registered
from services.weight_sync.records import PolicyVersion, ShardSlice, WireBucket, WireFormat, WireTensor

V1, V2, V3 = PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(2, 0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A path under /dev/shm, removed afterwards."""
    handle, name = tempfile.mkstemp(prefix="flotilla-test-", dir="/dev/shm")
    os.close(handle)
    yield Path(name)
    Path(name).unlink(missing_ok=True)


def write(path: Path, *tensors: torch.Tensor) -> int:
    """Write tensors one after the other; the size in bytes."""
    data = b"".join(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in tensors)
    path.write_bytes(data)
    return len(data)


def whole(name: str, x: torch.Tensor, offset: int = 0) -> ShardSlice:
    shape = tuple(x.shape)
    return ShardSlice(name, shape, (0,) * x.dim(), shape, str(x.dtype)[6:], offset, x.contiguous().stride())


def test_slices_with_strides_and_parts_become_whole_tensors(shared):
    fused = torch.arange(48, dtype=torch.float32).view(8, 6)
    norm = torch.arange(5, dtype=torch.bfloat16)
    size = write(shared, fused, norm)
    slices = [
        ShardSlice("q", (4, 6), (0, 0), (2, 6), "float32", 0, (6, 1)),
        ShardSlice("q", (4, 6), (2, 0), (2, 6), "float32", 4 * 6 * 4, (6, 1)),
        ShardSlice("t", (6, 2), (0, 0), (6, 2), "float32", 2 * 6 * 4, (1, 6)),
        whole("norm", norm, offset=192),
    ]
    tensors = read_tensors(map_memory(str(shared), size, slices))
    assert tensors["q"].equal(torch.cat([fused[:2], fused[4:6]]))
    assert tensors["t"].equal(fused[2:4].T)
    assert tensors["norm"].equal(norm)
    write(shared, torch.zeros(8, 6), torch.zeros(5, dtype=torch.bfloat16))
    assert tensors["norm"].equal(norm), "what was read belongs to the agent"


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (ShardSlice("a", (4,), (0,), (4,), "float64", 0, (1,)), "unknown dtype float64"),
        (ShardSlice("a", (4,), (0,), (4,), "float32", 4, (1,)), "outside the memory"),
        (ShardSlice("a", (4, 2), (0, 0), (4, 2), "bfloat16", 0, (3, 1)), "outside the memory"),
        (ShardSlice("a", (4,), (2,), (4,), "float32", 0, (1,)), "outside its tensor"),
        (ShardSlice("a", (4,), (0,), (4,), "float32", 0, ()), "different lengths"),
        (ShardSlice("a", (2,), (0,), (2,), "float32", 2, (1,)), "not a multiple"),
    ],
)
def test_malformed_slices_are_refused_by_name(shared, one, message):
    write(shared, torch.zeros(4))
    with pytest.raises(InvalidArgument, match=f"slice of a .*{message}"):
        map_memory(str(shared), 16, [one])


def test_memory_that_cannot_be_mapped_is_refused(shared, tmp_path):
    with pytest.raises(FailedPrecondition, match="cannot map"):
        map_memory(str(shared) + "-gone", 16, [])
    write(shared, torch.zeros(4))
    with pytest.raises(FailedPrecondition, match="cannot map"):
        map_memory(str(shared), 4096, [])
    with pytest.raises(InvalidArgument, match="not under"):
        map_memory(str(tmp_path / "x"), 16, [])
    with pytest.raises(InvalidArgument, match="not under"):
        map_memory("/dev/shm/../../etc/passwd", 16, [])


async def test_announce_needs_shards():
    with pytest.raises(FailedPrecondition, match="register the shards first"):
        Holder().announce(V1)


async def test_a_version_is_read_and_kept(shared):
    x = torch.arange(4.0)
    agent = Holder()
    agent.register(map_memory(str(shared), write(shared, x), [whole("a", x)]))
    assert await agent.wait_read(None, 1.0) is None
    agent.announce(V1)
    held = await agent.wait_read(V1, 10.0)
    assert held and held.version == V1 and held.tensors["a"].equal(x)
    write(shared, x + 1)
    agent.register(map_memory(str(shared), 16, [whole("a", x)]))
    agent.announce(V1)
    assert agent.holding(V1) is held and held.tensors["a"].equal(x), "a repeat reads nothing anew"
    with pytest.raises(Aborted, match="version 1/2 is not held"):
        agent.holding(V2)
    assert (await agent.wait_read(V2, 0.05)) is held


async def test_a_file_that_was_made_anew_is_mapped_anew(shared):
    x = torch.arange(4.0)
    agent = Holder()
    agent.register(map_memory(str(shared), write(shared, x), [whole("a", x)]))
    shared.unlink()
    agent.register(map_memory(str(shared), write(shared, x + 5), [whole("a", x)]))
    agent.announce(V1)
    held = await agent.wait_read(V1, 10.0)
    assert held and held.tensors["a"].equal(x + 5)


async def test_an_old_epoch_is_refused_and_an_old_step_ignored(shared):
    x = torch.arange(4.0)
    agent = Holder()
    agent.register(map_memory(str(shared), write(shared, x), [whole("a", x)]))
    agent.announce(V3)
    with pytest.raises(Aborted, match="old epoch"):
        agent.announce(V2)
    await agent.wait_read(V3, 10.0)
    with pytest.raises(Aborted, match="old epoch"):
        agent.announce(V1)
    agent.announce(PolicyVersion(2, 1))
    await agent.wait_read(PolicyVersion(2, 1), 10.0)
    agent.announce(V3)
    assert agent.holding(PolicyVersion(2, 1))


async def test_a_read_that_was_overtaken_is_void(shared, monkeypatch):
    x = torch.arange(4.0)
    entered, go_on = threading.Event(), threading.Event()

    def slow(registration):
        entered.set()
        assert go_on.wait(10)
        return read_tensors(registration)

    monkeypatch.setattr(held_module, "read_tensors", slow)
    agent = Holder()
    agent.register(map_memory(str(shared), write(shared, x), [whole("a", x)]))
    agent.announce(V1)
    assert await asyncio.to_thread(entered.wait, 10)
    seen = []
    waiter = asyncio.create_task(agent.wait_read(V1, 10.0))
    write(shared, x + 1)
    agent.announce(V2)
    go_on.set()
    seen.append(await waiter)
    assert seen[0] and seen[0].version == V2 and seen[0].tensors["a"].equal(x + 1)


async def test_a_read_that_failed_is_tried_again(shared, monkeypatch):
    x = torch.arange(4.0)
    agent = Holder()
    agent.register(map_memory(str(shared), write(shared, x), [whole("a", x)]))
    monkeypatch.setattr(held_module, "read_tensors", lambda registration: 1 / 0)
    before = agent.incarnation
    agent.announce(V1)
    assert await agent.wait_read(V1, 0.2) is None
    assert agent.incarnation != before, "the trainer sees that it must announce again"
    monkeypatch.setattr(held_module, "read_tensors", read_tensors)
    agent.announce(V1)
    held = await agent.wait_read(V1, 10.0)
    assert held and held.version == V1


def bucket(name: str, wire_bytes: int = 16) -> WireBucket:
    return WireBucket(0, (WireTensor(name, (4,), "float32", WireFormat.PLAIN, 16),), wire_bytes)


async def test_a_version_that_is_held_for_another_plan_alone_is_forgotten(shared):
    """As after a read from the memory of a GPU, where only the encoded bytes are kept."""
    x = torch.arange(4.0)
    agent = Holder()
    agent.register(map_memory(str(shared), write(shared, x), [whole("a", x)]))
    agent.announce(V1)
    held = await agent.wait_read(V1, 10.0)
    assert held and agent.use(V1, (bucket("a"),)) is held
    encoded = held.encode((bucket("a"),), torch.device("cpu"))
    held.tensors.clear()
    assert agent.use(V1, (bucket("a"),)) is held and held.encode((bucket("a"),), torch.device("cpu")) is encoded
    before = agent.incarnation
    with pytest.raises(Aborted, match="held for another plan"):
        agent.use(V1, (bucket("a"), bucket("a")))
    assert agent.held is None and agent.incarnation != before, "the trainer sees that it must announce again"
    agent.announce(V1)
    assert await agent.wait_read(V1, 10.0)


def test_a_version_that_was_given_up_meanwhile_cannot_be_encoded_in_other_buckets():
    """As when two transfers with different plans start before the first has encoded."""
    held = Held(V1, (), {"a": torch.arange(4.0)}, 0.0)
    first = held.encode((bucket("a"),), torch.device("cpu"))
    held.tensors.clear()
    with pytest.raises(Aborted, match="held for another plan"):
        held.encode((bucket("a"), bucket("a")), torch.device("cpu"))
    assert held.encode((bucket("a"),), torch.device("cpu")) is first


def test_a_registration_names_one_kind_of_memory(shared):
    neither = agent_pb2.RegisterShardsRequest()
    both = agent_pb2.RegisterShardsRequest(shared_memory_path=str(shared), cuda_memory=agent_pb2.CudaMemory())
    for request in (neither, both):
        with pytest.raises(InvalidArgument, match="either shared memory or memory of a GPU"):
            map_registered(request)
