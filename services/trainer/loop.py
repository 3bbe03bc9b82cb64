"""The step clock: from the start of the trainer to the end of the run.

    buffer ── RegisterRun, BeginEpoch ──►┐
    checkpoint or HF weights ───────────►│ start
                                         ▼
          ┌────────────────────── publish version ──► agent: RegisterShards, AnnounceVersion, WaitRead
          │                              │             coordinator: PublishVersion
          │                              ▼
          │                      LeaseBatch, FetchSamples ── RUN_COMPLETE ──► finish
          │                              │ ── commit_requested: checkpoint, Commit
          │                              ▼
          │              all ranks: log-probs, optimizer steps
          │                              ▼
          │                          AckBatch
          │                              │
          └──────────────────────────────┤
                                         ▼
                                      metrics ── every save_interval: begin a checkpoint;
                                                  Commit once it is final on disk

Waits: for the buffer (a sealed batch, an answer), for the agent (to read a version), for the coordinator (to take
note), for the other ranks; each is on the status board. It never waits for an engine. A kill at any point, of any rank,
loses at most the steps since the last checkpoint, whose batches the next BeginEpoch hands out again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from flotilla.buffer.v1 import buffer_pb2
from flotilla.common.v1 import common_pb2
from services.common.errors import FailedPrecondition
from services.common.kill_points import kill_point
from services.common.logs import get_logger
from services.common.rpc import open_channel
from services.common.run_checkpoints import CHECKPOINTS, checkpoint_path, checkpoint_steps
from services.common.service import ServiceHost
from services.trainer import checkpoint
from services.trainer.buffer_client import BufferClient
from services.trainer.checkpoint import RunState
from services.trainer.codec import rollout_metrics
from services.trainer.control import Control, Phase, Saved
from services.trainer.fleet import Fleet
from services.trainer.flops import forward_flops
from services.trainer.metrics import MetricsWriter
from services.trainer.publisher import Publisher
from services.trainer.rank import Rank
from services.trainer.report import Metrics, Report, train_metrics

EVALUATION_MARGIN_S = 60.0
"""Beyond the deadline of an evaluation, for the buffer to end it."""
SAVE_POLL_S = 0.5
"""How soon a checkpoint that has been written is seen."""
STRAGGLING = 1.5
"""A rank that takes so much longer than the mean is named."""

R = TypeVar("R")
log = get_logger(__name__)


class TrainingRun:
    """One life of the trainer."""

    def __init__(self, host: ServiceHost, control: Control, rank: Rank) -> None:
        self._host, self._spec, self._control, self._rank = host, host.spec, control, rank
        self._fleet = Fleet(host.spec, rank)
        at = host.spec.services
        self._channels = [open_channel(one.grpc) for one in (at.buffer, at.weight_sync)]
        self._buffer = BufferClient(host.spec, host.board, self._channels[0])
        self._publisher = Publisher(host.spec.run_id, host.board, self._channels[1])
        self._metrics = MetricsWriter(host.spec.run_dir)
        self._root = host.spec.run_dir / CHECKPOINTS
        self._digests: list[str] = []
        self._saved_step = -1
        """Of the newest checkpoint, which may not be final yet; -1 for none."""
        self._unfinished_step: int | None = None
        """Of a checkpoint that is being written."""
        self._saving_s = 0.0
        """Spent on checkpoints since the last step was recorded."""

    async def run(self) -> None:
        """Train to the end of the run, then stop the process."""
        await self._buffer.register_run()
        if not await self._buffer.is_stopped():
            await self._start()
            await self._publish()
            while (batch := await self._next_batch()) is not None:
                await self._do_step(*batch)
            await self._finish()
        await self._fleet.end()
        self._control.phase = Phase.DONE
        self._host.stopping.set()

    async def close(self) -> None:
        """Leave nothing behind but the files of the run."""
        self._metrics.close()
        await self._fleet.close()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _start(self) -> None:
        await self._rank.open()
        self._host.spawn(self._fleet.watch(), "watch of the ranks")
        state, path = RunState(0, self._spec.digest(), ()), ""
        if steps := checkpoint_steps(self._root):
            self._saved_step = steps[-1]
            newest = checkpoint_path(self._root, steps[-1])
            state, path = checkpoint.read_state(newest), str(newest)
        await self._fleet.load(state.step if path else None)
        self._digests = list(state.batch_digests)
        epoch = await self._buffer.begin_epoch(state.step, path, state.batch_digests)
        self._control.run_epoch, self._control.step = epoch, state.step
        self._control.committed_step = max(self._saved_step, 0)
        self._host.spawn(self._publisher.beat(), "coordinator heartbeat")
        log.info("training starts", run_epoch=epoch, step=state.step, checkpoint=path)

    async def _publish(self) -> float:
        """Publish the weights as they are. Returns the seconds it took."""
        begun = time.monotonic()
        self._control.phase = Phase.PUBLISHING
        version = common_pb2.PolicyVersion(run_epoch=self._control.run_epoch, step=self._control.step)
        await self._fleet.export(version)
        await self._publisher.publish(version)
        return time.monotonic() - begun

    async def _next_batch(self) -> tuple[buffer_pb2.BatchManifest, float] | None:
        """The next batch and the seconds waited for it; None when the run is complete or was ended."""
        begun, flops = time.monotonic(), forward_flops(self._rank.learner.model)
        while True:
            self._control.phase = Phase.WAITING
            answer = await self._saving_beside(self._buffer.lease_batch(self._control.run_epoch, flops))
            waited = time.monotonic() - begun
            if answer.commit_requested and self._control.committed_step < self._control.step:
                await self._save()
            await self._obey()
            if answer.manifest is not None:
                return answer.manifest, waited
            if answer.run_complete or await self._buffer.is_stopped():
                return None

    async def _saving_beside(self, wait: Coroutine[Any, Any, R]) -> R:
        """Wait, and commit a checkpoint meanwhile, as soon as it has been written."""
        waiting = asyncio.create_task(wait)
        try:
            while not waiting.done():
                await self._finish_save(wait=False)
                await asyncio.wait({waiting}, timeout=SAVE_POLL_S)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _obey(self) -> None:
        """Between steps: save if somebody asked, and stay while paused."""
        while self._control.save_wanted or self._control.paused_at_s is not None:
            if self._control.save_wanted:
                await self._save()
            else:
                with self._host.board.waiting("ResumeTraining"):
                    await self._control.changed()

    async def _do_step(self, manifest: buffer_pb2.BatchManifest, waited_s: float) -> None:
        if manifest.batch != self._control.step:
            raise FailedPrecondition(
                f"the buffer gave batch {manifest.batch} to a trainer at step {self._control.step}"
            )
        self._control.phase = Phase.TRAINING
        reports = await self._fleet.train(manifest)
        kill_point("trainer_after_optimizer_step")
        await self._buffer.ack_batch(self._control.run_epoch, manifest)
        kill_point("trainer_after_ack")
        self._digests.append(manifest.digest)
        self._control.step += 1
        times = {"time/wait_batch_seconds": waited_s, "time/publish_seconds": await self._publish()}
        rollout = rollout_metrics(manifest.stats, manifest.schedule)
        self._record({**rollout, **train_metrics(reports), **times})
        warn_of_ranks(reports)
        await self._finish_save(wait=False)
        if self._control.step % self._spec.trainer.save_interval == 0:
            await self._begin_save()

    def _record(self, values: Metrics) -> None:
        """Before the step's checkpoint: a trainer that goes on from it does not repeat the step."""
        values = {**values, "time/save_seconds": self._saving_s}
        self._saving_s = 0.0
        self._metrics.write(self._control.step, self._control.run_epoch, values)
        self._control.finish_step(values)
        log.info("step done", step=self._control.step, reward=round(values["rollout/mean_reward"], 4))

    async def _save(self) -> None:
        """Checkpoint the step now, and commit it."""
        await self._begin_save()
        await self._finish_save(wait=True)

    async def _begin_save(self) -> None:
        """Begin the checkpoint of the step, once the one before is final."""
        if self._saved_step == self._control.step and self._unfinished_step is not None:
            return
        await self._finish_save(wait=True)
        begun = time.monotonic()
        self._control.phase = Phase.SAVING
        await self._fleet.begin_save(self._control.step, self._digests)
        self._saved_step = self._unfinished_step = self._control.step
        self._saving_s += time.monotonic() - begun

    async def _finish_save(self, *, wait: bool) -> None:
        """If a checkpoint has been written, or that is to be waited for: commit it, and let go of old ones."""
        step = self._unfinished_step
        if step is None:
            return
        begun = time.monotonic()
        if await self._fleet.finish_save(wait=wait):
            path = str(checkpoint_path(self._root, step))
            kill_point("trainer_after_checkpoint")
            await self._buffer.commit(self._control.run_epoch, step, path)
            kill_point("trainer_after_commit")
            self._unfinished_step, self._control.committed_step = None, step
            await asyncio.to_thread(checkpoint.remove_old, self._root, self._spec.trainer.keep_checkpoints)
            if step == self._control.step:
                self._control.answer_saves(Saved(step, path))
        self._saving_s += time.monotonic() - begun

    async def _finish(self) -> None:
        """Nothing is left to train on: make the result durable, let the evaluation end, export, end the run."""
        if self._saved_step != self._control.step:
            await self._begin_save()
        await self._finish_save(wait=True)
        if self._spec.evaluation.sets:
            await self._until_evaluated()
        await self._fleet.export_model()
        await self._buffer.stop_run()
        log.info("the run is complete", step=self._control.step)

    async def _until_evaluated(self) -> None:
        deadline = time.monotonic() + self._spec.evaluation.deadline_s + EVALUATION_MARGIN_S
        while not await self._buffer.evaluation_complete(self._control.step):
            if time.monotonic() >= deadline:
                log.warning("the last evaluation did not end in time", step=self._control.step)
                return


def warn_of_ranks(reports: list[Report]) -> None:
    """Say which micro-batch of which rank had no finite loss, and which rank holds up the others."""
    for rank, report in enumerate(reports):
        for one in report.not_finite:
            log.warning("a loss is not finite", rank=rank, optimizer_step=one.optimizer_step, micro_batch=one.index)
    for step in reports[0].skipped_steps:
        log.warning("a gradient was not finite; the optimizer step was skipped", optimizer_step=step)
    busy = [one.busy_seconds for one in reports]
    if max(busy) > STRAGGLING * sum(busy) / len(busy):
        log.warning("a rank is slower than the others", rank=busy.index(max(busy)), seconds=busy)
