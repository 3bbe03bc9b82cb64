"""The trainer's process from start to end: the real Megatron, real checkpoints and shared memory.

Buffer, weight agent and coordinator are fakes (tests/trainer_peers.py): real gRPC servers that record what they see.
"""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flotilla.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from services.common.rpc import call, open_channel
from services.trainer.flops import forward_flops
from services.trainer.model_config import read_config
from tests.tiny_models import save_model
from tests.trainer_peers import digest
from tests.trainer_stage import STEPS, Stage, assert_same, finish, make_stage

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

KILL_POINTS = (
    "trainer_after_optimizer_step",
    "trainer_after_ack",
    "trainer_after_checkpoint",
    "trainer_after_commit",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, seed=21)
    return path


@pytest.fixture(scope="module")
async def whole_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """An uninterrupted run."""
    async with make_stage("trainer-whole", model, tmp_path_factory.mktemp("whole")) as stage:
        code, errors = await finish(await stage.start())
        assert code == 0, errors[-4000:]
        yield stage


async def test_a_whole_run(whole_run: Stage) -> None:
    peers, spec = whole_run.peers, whole_run.spec
    root = spec.run_dir / "checkpoints"
    assert peers.epochs == [(0, "", [])]
    assert peers.published == [(1, step) for step in range(STEPS + 1)]
    assert peers.acked == [(1, batch) for batch in range(STEPS)]
    assert peers.commits == [(step, str(root / f"step-{step:08d}")) for step in (2, 4)]
    assert [path.name for path in root.iterdir()] == ["step-00000004"], "keep_checkpoints = 1"
    assert peers.stopped
    assert not whole_run.shared_memory[0].exists()


async def test_the_buffer_hears_of_the_layout(whole_run: Stage, model: Path) -> None:
    flops = forward_flops(read_config(model))
    for lease in whole_run.peers.leases:
        assert (lease.data_parallel_size, lease.context_parallel_size, lease.micro_batch_multiple) == (1, 1, 1)
        assert lease.max_tokens_per_micro_batch == whole_run.spec.trainer.max_tokens_per_micro_batch
        assert lease.balance_data
        assert (lease.flops_per_token, lease.flops_per_token_squared) == (flops.per_token, flops.per_token_squared)


async def test_the_agent_sees_hf_tensors_of_each_version(whole_run: Stage, model: Path) -> None:
    registered = whole_run.peers.registered
    assert registered is not None
    first, last = load_file(model / "model.safetensors"), whole_run.exported()
    assert {one.name for one in registered.slices} == set(first)
    for memory, expected in ((whole_run.peers.memory[1, 0], first), (whole_run.peers.memory[1, STEPS], last)):
        for one in registered.slices:
            assert (one.dtype, list(one.begin), list(one.full_shape)) == ("float32", [0] * len(one.shape), one.shape)
            flat = torch.frombuffer(bytearray(memory[one.offset_bytes :]), dtype=torch.float32)
            assert torch.equal(torch.as_strided(flat, list(one.shape), list(one.strides)), expected[one.name])
    assert any(not torch.equal(first[name], last[name]) for name in first)


async def test_metrics_of_a_run(whole_run: Stage) -> None:
    rows = whole_run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["run_epoch"] == 1
        assert row["rollout/mean_reward"] == 0.5
        assert row["rollout/dropped_groups"] == 2
        assert row["rollout/tokens_per_second"] == 50
        assert row["rollout/packing_efficiency"] == 0.75
        assert row["train/skipped_steps"] == 0
        assert row["train/log_prob_gap_max"] > row["train/log_prob_gap_mean"] > 0
    saving = [row["time/save_seconds"] > 0 for row in rows]
    assert saving[:3] == [False, False, True], "the checkpoint of step 2, which may be final only in step 4"
    assert list((whole_run.spec.run_dir / "tensorboard").iterdir())


async def test_a_killed_trainer_goes_on_where_the_checkpoint_is(whole_run: Stage, model: Path, tmp_path: Path) -> None:
    """Killed after batch 2 is acknowledged, with a checkpoint of step 2: it trains batch 2 again, bitwise alike."""
    async with make_stage("trainer-killed", model, tmp_path) as stage:
        first = await stage.start()
        await stage.peers.until(lambda: (1, 1) in stage.peers.acked)
        stage.peers.hold_batches = True
        await stage.peers.until(lambda: stage.peers.commits)
        stage.peers.hold_batches = False
        await stage.peers.tell()
        await stage.peers.until(lambda: (1, 2) in stage.peers.acked)
        first.kill()
        await finish(first)
        assert stage.shared_memory[0].exists(), "a killed process cannot clean up"
        code, errors = await finish(await stage.start())
        assert code == 0, errors[-4000:]
        checkpoint = str(stage.spec.run_dir / "checkpoints" / "step-00000002")
        assert stage.peers.epochs[1] == (2, checkpoint, [digest(0), digest(1)])
        assert stage.peers.acked[3:] == [(2, 2), (2, 3)]
        assert (2, 2) in stage.peers.published, "the version it starts from is published first"
        assert not stage.shared_memory[0].exists()
        assert_same(stage.exported(), whole_run.exported())


async def test_a_trainer_killed_at_every_kill_point_ends_bitwise_alike(
    whole_run: Stage, model: Path, tmp_path: Path
) -> None:
    kill_points = tmp_path / "kill_points"
    kill_points.mkdir()
    for name in KILL_POINTS:
        (kill_points / name).touch()
    async with make_stage("trainer-kill-points", model, tmp_path) as stage:
        peers, root = stage.peers, stage.spec.run_dir / "checkpoints"
        for _ in KILL_POINTS:
            code, errors = await finish(await stage.start(FLOTILLA_KILL_POINTS=str(kill_points)))
            assert code == -signal.SIGKILL, errors[-4000:]
        assert list(kill_points.iterdir()) == []
        code, errors = await finish(await stage.start(FLOTILLA_KILL_POINTS=str(kill_points)))
        assert code == 0, errors[-4000:]
        assert [step for step, _, _ in peers.epochs] == [0, 0, 0, 2, 4]
        assert peers.acked[:3] == [(2, 0), (3, 0), (3, 1)], "training goes on while a checkpoint is written"
        assert peers.acked[-2:] == [(4, 2), (4, 3)]
        assert peers.commits == [(4, str(root / "step-00000004"))], "BeginEpoch commits the one before"
        assert_same(stage.exported(), whole_run.exported())


async def test_a_full_buffer_gets_a_checkpoint_before_the_next_batch(
    whole_run: Stage, model: Path, tmp_path: Path
) -> None:
    """Step 1 is committed while the trainer waits for a batch, step 3 although there is one."""
    async with make_stage("trainer-full", model, tmp_path) as stage:
        peers = stage.peers
        peers.is_full = True
        process = await stage.start()
        await peers.until(lambda: (1, 0) in peers.acked)
        peers.hold_batches = True
        await peers.until(lambda: peers.commits)
        peers.hold_batches = False
        await peers.tell()
        code, errors = await finish(process)
        assert code == 0, errors[-4000:]
        assert [step for step, _ in peers.commits] == peers.acks_at_commit == [1, 2, 3, 4]
        assert_same(stage.exported(), whole_run.exported())


async def test_control_and_restarts_of_peers(model: Path, tmp_path: Path) -> None:
    """One trainer lives through: pause, a checkpoint by hand, a new agent, and another trainer that takes over."""
    async with make_stage("trainer-control", model, tmp_path) as stage:
        peers = stage.peers
        peers.hold_batches = True
        process = await stage.start()
        await peers.until(lambda: (1, 0) in peers.published)
        async with open_channel(stage.spec.services.trainer.grpc) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            run = {"run_id": stage.spec.run_id}
            pause = trainer_pb2.PauseTrainingRequest(**run, request_id="pause")
            await call(stub.PauseTraining, pause, timeout_s=5, patience_s=10)
            watched = stub.WatchSteps(trainer_pb2.WatchStepsRequest(**run))
            peers.hold_batches = False
            await peers.tell()
            save = trainer_pb2.SaveCheckpointRequest(**run, request_id="save")
            saved = await call(stub.SaveCheckpoint, save, timeout_s=20)
            assert (saved.step, peers.commits) == (0, [(0, saved.checkpoint)])
            status = await call(stub.GetTrainerStatus, trainer_pb2.GetTrainerStatusRequest(**run), timeout_s=5)
            assert status.phase == trainer_pb2.TRAINER_PHASE_PAUSED
            assert (status.version.run_epoch, status.version.step, peers.acked) == (1, 0, [])

            peers.restart_agent()
            await peers.until(lambda: peers.held is not None, 10)
            assert peers.registrations[-1] == peers.incarnation

            resume = trainer_pb2.ResumeTrainingRequest(**run, request_id="resume")
            assert (await call(stub.ResumeTraining, resume, timeout_s=5)).paused_for.ToSeconds() >= 0
            step: Any = await watched.read()
            assert step.metrics.step == 1
            assert "train/loss" in step.metrics.values
        peers.epoch += 1
        code, errors = await finish(process)
        assert code == 1
        assert "epoch 1 is old" in errors
        assert not stage.shared_memory[0].exists()


async def test_a_signal_stops_it(model: Path, tmp_path: Path) -> None:
    async with make_stage("trainer-signal", model, tmp_path) as stage:
        stage.peers.hold_batches = True
        process = await stage.start()
        await stage.peers.until(lambda: (1, 0) in stage.peers.published)
        process.send_signal(signal.SIGTERM)
        code, errors = await finish(process, 20)
        assert code == 0, errors[-4000:]
        assert not stage.shared_memory[0].exists()


async def test_an_unknown_model_type_is_named(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    async with make_stage("trainer-unknown", other, tmp_path) as stage:
        code, errors = await finish(await stage.start())
        assert code == 2
        assert "mamba" in errors
        assert str(other / "config.json") in errors
