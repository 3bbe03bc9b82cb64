"""Updates over NCCL, and what becomes of a session when one of its ranks dies, stops or never comes. Needs two GPUs.

Trainer and agent are on GPU 0, engines on GPU 1. Trainer and engines are stand-ins (tests/weight_sync_fleet.py).
"""

# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from flotilla.rollout_gateway.v1 import engine_pb2
from services.common.errors import Aborted
from services.common.rpc import duration
from services.weight_sync import codec
from services.weight_sync.agent.held import Held
from services.weight_sync.agent.sender import Sender, TransferOrder
from services.weight_sync.plan import make_plan
from services.weight_sync.reception import Reception
from services.weight_sync.records import ManifestParameter, Plan, PolicyVersion, ShardSlice
from services.weight_sync.session import ABORT_TIMEOUT_S
from services.weight_sync.transport import serve_store
from tests.weight_sync_fleet import STAND_IN, Fleet, Process, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WAIT_S = 55.0
SESSION_S = 8.0
PROMPT_S = 2.0
MARGIN_S = 3.0
POLL_S = 0.01
BYTES = 4 << 30
SHAPES: dict[str, tuple[int, ...]] = {f"model.layers.{i}.up_proj.weight": (4096, 4096) for i in range(64)}
"""2 GiB as bfloat16, far more than NCCL takes in before the other side does."""


def run(folder: Path, scenario: Callable[[Fleet], Awaitable[None]], **settings: object) -> None:
    async def whole() -> None:
        async with asyncio.timeout(WAIT_S):
            async with Fleet(folder, SHAPES, trainer_gpus="0", engine_gpus="1", weight_sync=settings) as fleet:
                await scenario(fleet)

    asyncio.run(whole())


async def loaded(engine: Process, step: int) -> None:
    said = await engine.hear("loaded")
    assert said["loaded"] == step and not said["wrong"] and not said["left_over"]


@pytest.mark.parametrize(("quantization", "options"), [("fp8_block_128", ["--keep-fp8"]), ("none", [])])
def test_updates_arrive(tmp_path: Path, quantization: str, options: list[str]) -> None:
    async def scenario(fleet: Fleet) -> None:
        trainer, engine = await asyncio.gather(fleet.trainer(), fleet.engine("1", *options))
        for step in range(3):
            await trainer.ask(step)
            await loaded(engine, step)
            row = await fleet.until_live(PolicyVersion(1, step))
            print(f"{row['wire_bytes'] / row['wire_seconds'] / 1e9:.0f} GB/s, connected in {row['connect_seconds']} s")

    run(tmp_path, scenario, quantization=quantization)


def test_a_receiver_that_is_killed_in_the_middle_costs_only_its_session(tmp_path: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        trainer, victim = await asyncio.gather(fleet.trainer(), fleet.engine("1", "--hang"))
        await trainer.ask(0)
        await victim.hear("connected")
        await asyncio.sleep(0.5)
        await victim.kill()
        engine = await fleet.engine("2", "--keep-fp8")
        await loaded(engine, 0)
        await trainer.ask(1)
        await loaded(engine, 1)
        await fleet.until_live(PolicyVersion(1, 1))

    run(tmp_path, scenario)


def test_a_receiver_that_stops_in_the_middle_ends_the_session_at_its_deadline(tmp_path: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        trainer, victim = await asyncio.gather(fleet.trainer(), fleet.engine("1", "--hang"))
        await trainer.ask(0)
        await victim.hear("connected")
        victim.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        while not (failures := (await fleet.sync_status()).engines[0].failures):
            await asyncio.sleep(POLL_S)
        assert failures == 1
        assert SESSION_S - MARGIN_S < time.monotonic() - begun < SESSION_S + ABORT_TIMEOUT_S + MARGIN_S
        await victim.kill()
        engine = await fleet.engine("2", "--keep-fp8")
        await loaded(engine, 0)

    run(tmp_path, scenario, session_timeout_s=SESSION_S)


# -------------------------------------------------------------------------------- the sender in the test's own process


def make_big_plan() -> tuple[Held, Plan]:
    names = [f"t{i}" for i in range(8)]
    rows = BYTES // 8 // 2 // 4096
    tensors = {name: torch.ones(rows, 4096, dtype=torch.bfloat16, device="cuda:0") for name in names}
    slices = [ShardSlice(name, (rows, 4096), (0, 0), (rows, 4096), "bfloat16") for name in names]
    manifest = [ManifestParameter(name, (rows, 4096), "bfloat16", False) for name in names]
    return Held(PolicyVersion(1, 0), (), tensors, 0.0), make_plan([slices], manifest, "none", BYTES // 8)


def run_sender(scenario: Callable[[asyncio.Task, Sender, Process], Awaitable[None]]) -> None:
    """A scenario in which a sender in this process has connected to a receiver that takes nothing."""

    async def whole() -> None:
        store = serve_store("127.0.0.1")
        rendezvous = f"127.0.0.1:{store.port}"
        held, plan = make_big_plan()
        sender = Sender(torch.device("cuda", 0))
        peer = await start("1", STAND_IN, "rank", "--rendezvous", rendezvous, "--rank", "1")
        try:
            async with asyncio.timeout(WAIT_S):
                await peer.hear("rendezvous")
                order = TransferOrder("s", rendezvous, 0, 2, range(1, 2), plan.buckets, SESSION_S)
                sending = asyncio.create_task(sender.run(order, held))
                await peer.hear("connected")
                await asyncio.sleep(0.5)
                assert not sending.done()
                await scenario(sending, sender, peer)
        finally:
            await peer.kill()

    asyncio.run(whole())


async def gone(sender: Sender) -> None:
    """The sender's thread ends soon, and the GPU is free of its kernels."""
    assert sender._session is not None
    await asyncio.to_thread(sender._session.thread.join, PROMPT_S)
    assert not sender._session.thread.is_alive(), "the thread waits on"
    begun = time.monotonic()
    await asyncio.to_thread(torch.cuda.synchronize, 0)
    assert time.monotonic() - begun < PROMPT_S, "kernels spin on"


def test_an_abort_in_the_middle_ends_everything_at_once() -> None:
    async def scenario(sending: asyncio.Task, sender: Sender, peer: Process) -> None:
        begun = time.monotonic()
        await sender.abort("s")
        with pytest.raises(Aborted, match="it was aborted"):
            await sending
        await gone(sender)
        assert time.monotonic() - begun < PROMPT_S

    run_sender(scenario)


def test_without_an_abort_the_deadline_ends_it() -> None:
    async def scenario(sending: asyncio.Task, sender: Sender, peer: Process) -> None:
        begun = time.monotonic()
        os.kill(peer.process.pid, signal.SIGKILL)
        with pytest.raises(Aborted):
            await sending
        assert time.monotonic() - begun < SESSION_S + MARGIN_S
        await gone(sender)

    run_sender(scenario)


def test_a_receiver_that_never_comes() -> None:
    async def whole() -> None:
        store = serve_store("127.0.0.1")
        held, plan = make_big_plan()
        order = TransferOrder("s", f"127.0.0.1:{store.port}", 0, 2, range(1, 2), plan.buckets, 2.0)
        begun = time.monotonic()
        with pytest.raises(Aborted):
            await Sender(torch.device("cuda", 0)).run(order, held)
        assert time.monotonic() - begun < 2.0 + MARGIN_S

    asyncio.run(whole())


def test_a_sender_that_is_killed_ends_the_receiver() -> None:
    """The store lives with the sender, as it does in the agent."""

    async def whole() -> None:
        sender = await start("0", STAND_IN, "rank", "--rank", "0")
        try:
            async with asyncio.timeout(WAIT_S):
                rendezvous = (await sender.hear("rendezvous"))["rendezvous"]
                reception = Reception(request(rendezvous), 0, torch.device("cuda", 1))
                await sender.hear("connected")
                await asyncio.sleep(0.5)
                assert reception.poll()["state"] == "receiving"
                begun = time.monotonic()
                await sender.kill()
                while reception.poll()["state"] == "receiving":
                    await asyncio.sleep(POLL_S)
                print(reception.poll()["error"])
                await asyncio.to_thread(torch.cuda.synchronize, 1)
                assert time.monotonic() - begun < SESSION_S + MARGIN_S
        finally:
            await sender.kill()

    asyncio.run(whole())


def request(rendezvous: str) -> engine_pb2.StartWeightUpdateRequest:
    _held, plan = make_big_plan()
    return engine_pb2.StartWeightUpdateRequest(
        session_id="s",
        rendezvous_address=rendezvous,
        world_size=2,
        first_rank=1,
        buckets=codec.buckets_to_proto(plan.buckets),
        session_timeout=duration(SESSION_S),
    )
