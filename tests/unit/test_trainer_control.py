"""Pause, checkpoints on request and watching of steps. Nothing is faked."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest

from flotilla.buffer.v1 import buffer_pb2
from flotilla.common.v1 import common_pb2
from flotilla.trainer.v1 import rank_pb2
from services.common.errors import FailedPrecondition
from services.trainer.batch import MicroBatch
from services.trainer.codec import batch_from_proto, report_from_proto, rollout_metrics, sample_from_bytes
from services.trainer.control import Control, Saved
from services.trainer.report import MicroBatchId, Report
from tests.trainer_peers import manifest


def test_pause_and_resume_are_idempotent() -> None:
    control = Control()
    assert control.resume() == 0
    control.pause()
    since = control.paused_at_s
    control.pause()
    assert control.paused_at_s == since
    assert control.resume() > 0
    assert control.paused_at_s is None
    assert control.resume() == 0


async def test_everybody_who_asked_hears_of_the_checkpoint() -> None:
    control = Control()
    asked = [asyncio.create_task(control.saved()) for _ in range(3)]
    async with asyncio.timeout(1):
        await control.changed()
    asked[2].cancel()
    await asyncio.sleep(0)
    assert control.save_wanted
    control.answer_saves(Saved(7, "path"))
    assert not control.save_wanted
    assert await asyncio.gather(*asked[:2]) == [Saved(7, "path")] * 2


async def test_watchers_get_steps_in_order_until_the_end() -> None:
    control, stopping = Control(), asyncio.Event()
    control.finish_step({"early": 1.0})

    async def collect() -> list[int]:
        return [one.step async for one in control.watch(stopping)]

    watching = asyncio.create_task(collect())
    await asyncio.sleep(0)
    for control.step in (1, 2, 3):
        control.finish_step({})
        await asyncio.sleep(0.01)
    stopping.set()
    async with asyncio.timeout(1):
        assert await watching == [1, 2, 3]


def test_a_batch_from_its_manifest() -> None:
    message = manifest(3)
    message.micro_batches.add(optimizer_step=1, data_parallel_rank=1, rows=[5])
    batch = batch_from_proto(message, replica=0)
    assert batch_from_proto(message, replica=1).micro_batches == (MicroBatch(1, (5,)),)
    assert (batch.number, batch.optimizer_steps, batch.rollouts_per_step) == (3, 2, (3, 3))
    assert [(one.optimizer_step, one.rows) for one in batch.micro_batches] == [(0, (0, 2)), (0, (1,)), (1, (3, 4, 5))]


def test_the_metrics_of_a_rollout() -> None:
    message = manifest(3)
    metrics = rollout_metrics(message.stats, message.schedule)
    assert metrics["rollout/dropped_groups"] == 2
    assert metrics["rollout/tokens_per_second"] == 50
    assert metrics["rollout/mixed_version_samples"] == 4
    assert metrics["rollout/dead_epoch_samples"] == 1
    assert metrics["rollout/packing_efficiency"] == 0.75
    assert metrics["rollout/imbalance"] == 1.25


def test_stats_without_time_have_no_speed() -> None:
    message = buffer_pb2.BatchManifest(batch=0)
    assert rollout_metrics(message.stats, message.schedule)["rollout/tokens_per_second"] == 0


def test_a_report_goes_through_its_message() -> None:
    report = Report(tokens=7, loss=0.5, grad_norms=[1.0, 0.0], skipped_steps=[1], not_finite=[MicroBatchId(1, 3)])
    assert report_from_proto(rank_pb2.TrainBatchResponse(**asdict(report))) == report


@pytest.mark.parametrize("broken", ["prompt_token_ids", "rollout_log_probs", "loss_mask"])
def test_a_sample_whose_lists_differ_is_refused(broken: str) -> None:
    message = common_pb2.Sample(
        group_id="g7", prompt_token_ids=[1], response_token_ids=[2, 3], rollout_log_probs=[-1, -2], loss_mask=[1, 1]
    )
    assert sample_from_bytes(message.SerializeToString()).response == (2, 3)
    message.ClearField(broken)
    with pytest.raises(FailedPrecondition, match="g7"):
        sample_from_bytes(message.SerializeToString())
