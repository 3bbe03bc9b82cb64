"""Sender and receivers over real gloo, in threads and processes of this machine. Nothing is faked."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.errors import Aborted, FailedPrecondition
from services.common.rpc import duration
from services.weight_sync import codec
from services.weight_sync.agent.held import Held
from services.weight_sync.agent.sender import Sender, Sent, TransferOrder
from services.weight_sync.meeting import Member, Seat, SessionError
from services.weight_sync.plan import make_plan
from services.weight_sync.reception import Reception
from services.weight_sync.records import ManifestParameter, PolicyVersion, ShardSlice
from services.weight_sync.transport import Routes, Transport, find_routes, serve_store
from tests import weight_sync_oracles as oracle

CPU = torch.device("cpu")
VERSION = PolicyVersion(1, 0)
TIMEOUT_S = 5.0
PROMPT_S = 10.0
"""Far below the time-out of a session, 60 s: something other than it must have ended the wait. Above the 5 s that
a lost answer of the resolver costs torch when it connects."""


@pytest.fixture
def rendezvous() -> Iterator[str]:
    """A store on loopback."""
    store = serve_store("127.0.0.1")
    yield f"127.0.0.1:{store.port}"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (40, 64), "layers.0.q": (130, 200), "layers.0.up": (256, 128), "norm": (65,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def plan_for(tensors: dict[str, torch.Tensor], bucket_bytes: int = 30_000):
    slices = [ShardSlice(n, tuple(x.shape), (0,) * x.dim(), tuple(x.shape), "float32") for n, x in tensors.items()]
    manifest = [ManifestParameter(n, tuple(x.shape), "float32", n.startswith("layers")) for n, x in tensors.items()]
    return make_plan([slices], manifest, "fp8_block_128", bucket_bytes)


def held(tensors: dict[str, torch.Tensor]) -> Held:
    return Held(VERSION, (), tensors, 0.0)


def order(rendezvous: str, session: str, tensors, receivers: int = 2, timeout_s: float = TIMEOUT_S) -> TransferOrder:
    world = receivers + 1
    return TransferOrder(session, rendezvous, 0, world, range(1, world), plan_for(tensors).buckets, timeout_s)


def reception(rendezvous: str, session: str, tensors, worker: int, receivers: int = 2, timeout_s: float = TIMEOUT_S):
    request = engine_pb2.StartWeightUpdateRequest(
        session_id=session,
        rendezvous_address=rendezvous,
        world_size=receivers + 1,
        first_rank=1,
        buckets=codec.buckets_to_proto(plan_for(tensors).buckets),
        session_timeout=duration(timeout_s),
    )
    return Reception(request, worker, CPU)


async def settled(one: Reception, timeout_s: float = 2 * TIMEOUT_S) -> dict:
    """The last poll of a reception."""
    give_up = time.monotonic() + timeout_s
    while one.poll()["state"] == "receiving":
        assert time.monotonic() < give_up, "the reception hangs"
        await asyncio.sleep(0.005)
    return one.poll()


class Loader:
    """Stands where vLLM stands."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def __call__(self, tensors) -> None:
        self.loaded = {name: x.clone() for name, x in tensors}


async def transfer(sender: Sender, rendezvous: str, session: str, tensors) -> tuple[Sent, list[Reception]]:
    receivers = [reception(rendezvous, session, tensors, worker) for worker in range(2)]
    sent = await sender.run(order(rendezvous, session, tensors), held(tensors))
    assert [(await settled(one))["state"] for one in receivers] == ["received", "received"]
    return sent, receivers


async def test_receivers_get_what_was_sent(rendezvous):
    tensors = weights()
    sent, receivers = await transfer(Sender(CPU), rendezvous, "s", tensors)
    assert [one.poll()["digest"] for one in receivers] == [sent.digest] * 2
    loader = Loader()
    receivers[0].load(loader, torch.float32)
    assert loader.loaded.keys() == tensors.keys()
    for name, x in tensors.items():
        plain = not name.startswith("layers")
        expected = x if plain else torch.from_numpy(oracle.dequantize(*oracle.quantize(x.numpy())))
        assert loader.loaded[name].equal(expected), name


async def test_the_digest_is_that_of_the_encoded_bytes(rendezvous):
    tensors = weights()
    sent, _ = await transfer(Sender(CPU), rendezvous, "s", tensors)
    encoded = {}
    for name, x in tensors.items():
        parts = oracle.quantize(x.numpy()) if name.startswith("layers") else [x.numpy()]
        encoded[name] = b"".join(part.tobytes() + bytes(-part.nbytes % 16) for part in parts)
    assert sent.digest == oracle.digest(encoded)


async def test_any_number_of_sessions_one_after_the_other(rendezvous):
    sender = Sender(CPU)
    for number in range(5):
        tensors = weights(number)
        sent, receivers = await transfer(sender, rendezvous, f"s{number}", tensors)
        assert receivers[1].poll()["digest"] == sent.digest


async def test_a_load_needs_all_bytes_and_may_be_repeated(rendezvous):
    tensors = weights()
    waiting = reception(rendezvous, "s", tensors, 0)
    with pytest.raises(RuntimeError, match="is receiving, not received"):
        waiting.load(Loader(), torch.float32)
    waiting.abort()
    _, [one, other] = await transfer(Sender(CPU), rendezvous, "s2", tensors)
    assert one.load(Loader(), torch.float32) == one.load(Loader(), torch.float32)
    one.abort()
    assert one.poll()["state"] == "received", "what is loaded cannot be aborted"
    other.abort()
    assert other.poll()["state"] == "failed"


async def test_a_load_that_broke_off_is_not_complete(rendezvous):
    class Torn(Loader):
        def __call__(self, tensors) -> None:
            next(tensors)
            raise OSError("torn")

    _, [one, _] = await transfer(Sender(CPU), rendezvous, "s", weights())
    staged = one._staged
    with pytest.raises(OSError, match="torn"):
        one.load(Torn(), torch.float32)
    assert staged and not staged.buffers, "the next session needs the memory"
    with pytest.raises(RuntimeError, match="failed, not received"):
        one.load(Loader(), torch.float32)


async def test_a_receiver_that_never_comes_ends_at_the_deadline(rendezvous):
    tensors = weights()
    lone = reception(rendezvous, "s", tensors, 0, timeout_s=0.5)
    begun = time.monotonic()
    with pytest.raises(Aborted):
        await Sender(CPU).run(order(rendezvous, "s", tensors, timeout_s=0.5), held(tensors))
    assert (await settled(lone))["state"] == "failed"
    assert 0.4 < time.monotonic() - begun < PROMPT_S


async def test_an_abort_at_the_sender_wakes_everybody(rendezvous):
    tensors, sender = weights(), Sender(CPU)
    lone = reception(rendezvous, "s", tensors, 0, timeout_s=60)
    running = asyncio.create_task(sender.run(order(rendezvous, "s", tensors, timeout_s=60), held(tensors)))
    await asyncio.sleep(0.2)
    begun = time.monotonic()
    await sender.abort("other")
    assert not running.done()
    await sender.abort("s")
    with pytest.raises(Aborted, match="it was aborted"):
        await running
    assert "aborted" in (await settled(lone))["error"]
    assert time.monotonic() - begun < PROMPT_S


async def test_an_abort_at_a_receiver_wakes_everybody(rendezvous):
    tensors, sender = weights(), Sender(CPU)
    lone = reception(rendezvous, "s", tensors, 0, timeout_s=60)
    running = asyncio.create_task(sender.run(order(rendezvous, "s", tensors, timeout_s=60), held(tensors)))
    await asyncio.sleep(0.2)
    lone.abort()
    with pytest.raises(Aborted):
        await asyncio.wait_for(running, PROMPT_S)
    late = reception(rendezvous, "s", tensors, 1, timeout_s=60)
    assert "aborted" in (await settled(late, PROMPT_S))["error"]


async def test_a_new_session_ends_the_old_one_and_a_repeat_joins(rendezvous):
    tensors, sender = weights(), Sender(CPU)
    old = asyncio.create_task(sender.run(order(rendezvous, "old", tensors), held(tensors)))
    await asyncio.sleep(0.1)
    receivers = [reception(rendezvous, "new", tensors, worker) for worker in range(2)]
    new = order(rendezvous, "new", tensors)
    first, second = await asyncio.gather(sender.run(new, held(tensors)), sender.run(new, held(tensors)))
    assert first is second
    assert [(await settled(one))["digest"] for one in receivers] == [first.digest] * 2
    with pytest.raises(Aborted):
        await old


async def test_weights_that_are_not_finite_are_refused(rendezvous):
    tensors = weights()
    tensors["layers.0.q"][3, 3] = float("nan")
    with pytest.raises(FailedPrecondition, match=r"layers\.0\.q"):
        await Sender(CPU).run(order(rendezvous, "s", tensors), held(tensors))


def seat(rendezvous: str, session: str, rank: int, world: int) -> Seat:
    return Seat(rendezvous, session, rank, world, rank == 0, CPU, time.monotonic() + 60, threading.Event())


def _join_and_hang(rendezvous: str, session: str, rank: int, world: int, joined) -> None:
    transport = Transport(seat(rendezvous, session, rank, world))
    joined.set()
    time.sleep(60)
    transport.close()


async def test_a_receiver_that_dies_ends_the_session_and_the_next_one_works(rendezvous):
    tensors, sender = weights(), Sender(CPU)
    spawn = multiprocessing.get_context("spawn")
    joined = spawn.Event()
    victim = spawn.Process(target=_join_and_hang, args=(rendezvous, "s", 2, 3, joined), daemon=True)
    victim.start()
    survivor = reception(rendezvous, "s", tensors, 0, timeout_s=60)
    running = asyncio.create_task(sender.run(order(rendezvous, "s", tensors, timeout_s=60), held(tensors)))
    assert await asyncio.to_thread(joined.wait, 30)
    await asyncio.sleep(0.2)
    assert not running.done(), "it waits for the receiver that hangs"
    begun = time.monotonic()
    victim.kill()
    with pytest.raises(Aborted):
        await running
    assert (await settled(survivor))["state"] == "failed"
    assert time.monotonic() - begun < PROMPT_S
    victim.join()
    sent, receivers = await transfer(sender, rendezvous, "s2", tensors)
    assert receivers[0].poll()["digest"] == sent.digest


def test_a_store_that_is_gone_is_noticed_at_once():
    begun = time.monotonic()
    with pytest.raises(SessionError):
        Transport(seat("127.0.0.1:9", "s", 0, 2))
    assert time.monotonic() - begun < PROMPT_S


def test_ranks_on_gpus_take_the_way_that_their_places_call_for():
    sender, near, far = Member(0, True, "a"), Member(1, False, "a"), Member(2, False, "b")
    assert find_routes([sender, Member(1, False, "b")]) == Routes(frozenset(), (0, 1))
    assert find_routes([sender, near]) == Routes(frozenset({1}), ())
    assert find_routes([sender, near, far]) == Routes(frozenset({1}), (0, 2))
    assert find_routes([sender, Member(1, True, "b"), Member(2, False, "c")]) == Routes(frozenset(), (0, 1, 2))


def test_places_without_a_way_are_refused():
    with pytest.raises(SessionError, match="rank 2 receives on the GPU of one of them"):
        find_routes([Member(0, True, "a"), Member(1, True, "b"), Member(2, False, "a")])
    with pytest.raises(SessionError, match="2 ranks of the session share GPU b"):
        find_routes([Member(0, True, "a"), Member(1, False, "b"), Member(2, False, "b")])
