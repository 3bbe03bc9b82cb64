"""The trainer as a fleet of ranks: real processes that meet over gloo, between stand-ins for their peers."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flotilla.trainer.v1 import rank_pb2, rank_pb2_grpc
from services.common.rpc import call, open_channel
from services.trainer.worker import CLOSE_S
from tests.conftest import free_ports
from tests.tiny_models import save_model
from tests.trainer_stage import STEPS, Stage, assert_same, finish, finish_all, make_stage

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

DATA_2 = {"tensor": 1}
TENSOR_2 = {"tensor": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, seed=21)
    return path


@pytest.fixture(scope="module")
async def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """One rank."""
    async with make_stage("fleet-alone", model, tmp_path_factory.mktemp("alone")) as stage:
        code, errors = await finish(await stage.start())
        assert code == 0, errors[-4000:]
        yield stage


@pytest.fixture(scope="module", params=[DATA_2, TENSOR_2], ids=["data 2", "tensor 2"])
async def whole_run(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    """An uninterrupted run of two ranks."""
    async with make_stage("fleet-whole", model, tmp_path_factory.mktemp("whole"), 2, parallel=request.param) as stage:
        for code, errors in await finish_all(await stage.start_all()):
            assert code == 0, errors[-4000:]
        yield stage


def assert_as_alone(stage: Stage, alone: Stage) -> None:
    """The same steps, published and committed, with the same metrics and weights but for rounding.

    AdamW divides a gradient by its own size: where it is nothing but rounding, a step may go either way.
    """
    assert stage.peers.acked == [(1, batch) for batch in range(STEPS)]
    assert stage.peers.published == [(1, step) for step in range(STEPS + 1)]
    assert [step for step, _ in stage.peers.commits] == [2, 4]
    for found, expected in zip(stage.rows(), alone.rows(), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy", "train/ppo_kl", "train/log_prob_gap_mean"):
            assert math.isclose(found[name], expected[name], rel_tol=1e-4, abs_tol=1e-5), name
    exported = alone.exported()
    for name, tensor in stage.exported().items():
        apart = (tensor - exported[name]).abs()
        assert apart.max() < stage.spec.optimizer.lr, name
        assert (apart > 1e-4).float().mean() < 1e-3, name
        assert apart.norm() < 1e-4 * exported[name].norm(), name


async def test_a_fleet_does_what_one_rank_does(whole_run: Stage, alone: Stage) -> None:
    assert_as_alone(whole_run, alone)
    assert not any(memory.exists() for memory in whole_run.shared_memory)


async def test_so_do_ranks_that_share_the_tokens_of_every_sample(model: Path, alone: Stage, tmp_path: Path) -> None:
    parallel = {"context": 2, "overlap": True}
    async with make_stage("fleet-context", model, tmp_path, 2, parallel=parallel) as stage:
        for code, errors in await finish_all(await stage.start_all()):
            assert code == 0, errors[-4000:]
        assert_as_alone(stage, alone)
        assert {(one.data_parallel_size, one.context_parallel_size) for one in stage.peers.leases} == {(1, 2)}


async def test_every_tensor_is_shared_by_one_rank(whole_run: Stage) -> None:
    """And the agents read the weights that are exported at the end."""
    exported = whole_run.exported()
    names = []
    for agent in whole_run.agents:
        assert agent.registered is not None
        memory = torch.frombuffer(bytearray(agent.memory[1, STEPS]), dtype=torch.uint8)
        for one in agent.registered.slices:
            assert list(one.shape) == list(one.full_shape)
            part = memory[one.offset_bytes :][: 4 * exported[one.name].numel()].view(torch.float32)
            assert torch.equal(part.view(*one.shape), exported[one.name]), one.name
            names.append(one.name)
    assert sorted(names) == sorted(exported)
    sizes = [agent.registered.shared_memory_bytes for agent in whole_run.agents if agent.registered]
    assert max(sizes) < 0.7 * sum(sizes)


async def test_a_rank_that_is_killed_ends_all_and_the_next_fleet_goes_on_exactly(
    whole_run: Stage, model: Path, tmp_path: Path
) -> None:
    """Once before the first checkpoint is final, and once after: rank 0 of data-parallel ranks, else rank 1."""
    parallel = whole_run.spec.parallel.model_dump()
    victim = int(whole_run.spec.parallel.tensor > 1)
    async with make_stage(f"fleet-killed-{victim}", model, tmp_path, 2, parallel=parallel) as stage:
        for acked in (1, 3):
            trainers = await stage.start_all()
            await stage.peers.until(lambda acked=acked: len({batch for _, batch in stage.peers.acked}) >= acked, 120)
            killed = time.monotonic()
            trainers[victim].send_signal(signal.SIGKILL)
            ended = await finish_all(trainers, 90)
            assert ended[1 - victim][0] not in (0, -signal.SIGKILL), ended[1 - victim][1][-3000:]
            assert time.monotonic() - killed < 60
        for code, errors in await finish_all(await stage.start_all()):
            assert code == 0, errors[-4000:]
        assert_same(stage.exported(), whole_run.exported())
        assert stage.peers.epochs[1][0] in (0, 2)
        last = {int(row["step"]): row for row in stage.rows()}
        assert [last[step]["train/loss"] for step in sorted(last)] == [row["train/loss"] for row in whole_run.rows()]


async def test_a_rank_that_stands_still_is_named(model: Path, tmp_path: Path) -> None:
    async with make_stage("fleet-hangs", model, tmp_path, 2, trainer={"hang_timeout_s": 8.0}) as stage:
        stage.peers.hold_batches = True
        trainers = await stage.start_all()
        await stage.peers.until(lambda: (1, 0) in stage.peers.published, 90)
        os.kill(trainers[1].pid, signal.SIGSTOP)
        stage.peers.hold_batches = False
        await stage.peers.tell()
        code, errors = await finish(trainers[0], 60)
        trainers[1].kill()
        await trainers[1].communicate()
        assert code == 1
        assert "rank 1 does not answer" in errors, errors[-3000:]


async def test_a_rank_of_another_fleet_does_nothing(model: Path, tmp_path: Path) -> None:
    async with make_stage("fleet-fence", model, tmp_path, 2) as stage:
        stage.peers.hold_batches = True
        trainers = await stage.start_all()
        await stage.peers.until(lambda: (1, 0) in stage.peers.published, 90)
        async with open_channel(stage.spec.services.trainers[1].grpc) as channel:
            rank = rank_pb2_grpc.TrainerRankServiceStub(channel)
            status = await call(
                rank.GetRankStatus, rank_pb2.GetRankStatusRequest(run_id=stage.spec.run_id), timeout_s=5
            )
            assert status.fleet_id and status.doing == "waiting to be told"
            end = rank_pb2.EndRankRequest(run_id=stage.spec.run_id, request_id="x", fleet_id="old")
            with pytest.raises(Exception, match="another fleet"):
                await call(rank.EndRank, end, timeout_s=5)
        for one in trainers:
            one.send_signal(signal.SIGTERM)
        assert [code for code, _ in await finish_all(trainers, 40)] == [0, 0]


async def test_ranks_that_are_stopped_before_they_meet_end_at_once(model: Path, tmp_path: Path) -> None:
    async with make_stage("fleet-apart", model, tmp_path, 2) as stage:
        trainers = [await stage.start(0), await stage.start(1, MASTER_PORT=str(free_ports(1)[0]))]
        for rank in range(2):
            async with open_channel(stage.spec.services.trainers[rank].grpc) as channel:
                await until_at(rank_pb2_grpc.TrainerRankServiceStub(channel), stage.spec.run_id, "meeting")
        stopped = time.monotonic()
        for one in trainers:
            one.send_signal(signal.SIGTERM)
        assert [code for code, _ in await finish_all(trainers, 40)] == [0, 0]
        assert time.monotonic() - stopped < CLOSE_S


async def until_at(rank: Any, run_id: str, what: str) -> None:
    """Wait until a rank says that it is at something."""
    async with asyncio.timeout(90):
        request, status = rank_pb2.GetRankStatusRequest(run_id=run_id), rank_pb2.GetRankStatusResponse()
        while what not in status.doing:
            status = await call(rank.GetRankStatus, request, timeout_s=5, patience_s=60)
            await asyncio.sleep(0.1)


async def test_too_few_ranks_are_refused(model: Path, tmp_path: Path) -> None:
    async with make_stage("fleet-few", model, tmp_path, 2) as stage:
        code, errors = await finish(await stage.start(WORLD_SIZE="1"))
        assert code == 2
        assert "services.trainer_ranks" in errors and "torchrun" in errors
        code, errors = await finish(await stage.start(rank=5))
        assert code == 2
        assert "RANK is 5" in errors
