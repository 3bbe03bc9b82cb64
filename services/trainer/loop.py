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
          │                  log-probs, optimizer steps   (worker thread)
          │                              ▼
          │                          AckBatch
          │                              │
          └──────────────────────────────┤
                                         ▼
                                      metrics ── every save_interval: checkpoint, then Commit

Waits: for the buffer (a sealed batch, an answer), for the agent (to read a version), for the coordinator (to take
note); each is on the status board. It never waits for an engine. Everything runs in the event loop but what touches
torch: that runs in one worker thread. A kill at any point loses at most the steps since the last checkpoint, whose
batches the next BeginEpoch hands out again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from services.common.errors import FailedPrecondition
from services.common.kill_points import kill_point
from services.common.logs import get_logger
from services.common.rpc import open_channel
from services.common.service import ServiceHost
from services.trainer import checkpoint, megatron
from services.trainer.batch import Batch
from services.trainer.buffer_client import BufferClient
from services.trainer.checkpoint import RunState
from services.trainer.control import Control, Phase, Saved
from services.trainer.export import export_hf, share_weights, shared_memory_path
from services.trainer.flops import forward_flops
from services.trainer.metrics import MetricsWriter
from services.trainer.model_config import read_config
from services.trainer.publisher import RANK, Publisher
from services.trainer.report import Metrics, train_metrics
from services.trainer.step import Learner

EVALUATION_MARGIN_S = 60.0
"""Beyond the deadline of an evaluation, for the buffer to end it."""

P = ParamSpec("P")
R = TypeVar("R")
log = get_logger(__name__)


class Worker:
    """The one thread that touches torch."""

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(1, "torch", initializer=partial(_use_threads, num_threads))

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run there, after what was given to it before."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args, **kwargs))

    async def close(self) -> None:
        """Wait for what it does now, and end it."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)


def _use_threads(count: int) -> None:
    if count:
        torch.set_num_threads(count)


class TrainingRun:
    """One life of the trainer."""

    def __init__(self, host: ServiceHost, control: Control) -> None:
        self._host, self._spec, self._control = host, host.spec, control
        at = host.spec.services
        self._channels = [open_channel(one.grpc) for one in (at.buffer, at.weight_agents[RANK], at.weight_sync)]
        self._buffer = BufferClient(host.spec, host.board, self._channels[0])
        self._worker = Worker(host.spec.trainer.num_threads)
        self._metrics = MetricsWriter(host.spec.run_dir)
        self._root = host.spec.run_dir / "checkpoints"
        self._digests: list[str] = []
        self._saved_step = -1
        self._saving_s = 0.0
        """Spent on checkpoints since the last step was recorded."""
        self._learner: Learner
        self._publisher: Publisher

    async def run(self) -> None:
        """Train to the end of the run, then stop the process."""
        await self._buffer.register_run()
        if not await self._buffer.is_stopped():
            await self._start()
            await self._publish()
            while (batch := await self._next_batch()) is not None:
                await self._do_step(*batch)
            await self._finish()
        self._control.phase = Phase.DONE
        self._host.stopping.set()

    async def close(self) -> None:
        """Leave nothing behind but the files of the run; nor what a life before was killed with."""
        shared_memory_path(self._spec.run_id, RANK).unlink(missing_ok=True)
        self._metrics.close()
        await asyncio.gather(*(channel.close() for channel in self._channels))
        await self._worker.run(megatron.destroy)
        await self._worker.close()

    async def _start(self) -> None:
        state = await self._worker.run(self._load)
        self._digests, step = list(state.batch_digests), state.step
        path = str(checkpoint.checkpoint_path(self._root, step)) if self._saved_step >= 0 else ""
        epoch = await self._buffer.begin_epoch(step, path, state.batch_digests)
        self._control.run_epoch, self._control.step = epoch, step
        self._control.committed_step = max(self._saved_step, 0)
        _, agent, coordinator = self._channels
        weights = await self._worker.run(share_weights, self._spec.run_id, RANK, self._learner)
        write = partial(self._worker.run, weights.write)
        board = self._host.board
        self._publisher = Publisher(self._spec.run_id, epoch, board, agent, coordinator, weights, write)
        self._host.spawn(self._publisher.beat(), "heartbeat")
        log.info("training starts", run_epoch=epoch, step=step, checkpoint=path)

    def _load(self) -> RunState:
        """In the worker: build the model and fill it from the newest checkpoint, or from the initial weights."""
        megatron.initialize(self._spec.trainer.seed)
        self._learner = Learner(self._spec, read_config(self._spec.model.hf_checkpoint))
        digest = self._spec.digest()
        if steps := checkpoint.checkpoint_steps(self._root):
            self._saved_step = steps[-1]
            return checkpoint.load(checkpoint.checkpoint_path(self._root, steps[-1]), self._learner, digest)
        self._learner.load_initial_weights()
        return RunState(0, digest, ())

    async def _publish(self) -> float:
        """Publish the weights as they are. Returns the seconds it took."""
        begun = time.monotonic()
        self._control.phase = Phase.PUBLISHING
        await self._publisher.publish(self._control.step)
        return time.monotonic() - begun

    async def _next_batch(self) -> tuple[Batch, float] | None:
        """The next batch and the seconds waited for it; None when the run is complete or was ended."""
        begun, flops = time.monotonic(), forward_flops(self._learner.model)
        while True:
            self._control.phase = Phase.WAITING
            answer = await self._buffer.lease_batch(self._control.run_epoch, flops)
            waited = time.monotonic() - begun
            if answer.commit_requested and self._control.committed_step < self._control.step:
                await self._save()
            await self._obey()
            if answer.batch is not None:
                return answer.batch, waited
            if answer.run_complete or await self._buffer.is_stopped():
                return None

    async def _obey(self) -> None:
        """Between steps: save if somebody asked, and stay while paused."""
        while self._control.save_wanted or self._control.paused_at_s is not None:
            if self._control.save_wanted:
                await self._save()
            else:
                with self._host.board.waiting("ResumeTraining"):
                    await self._control.changed()

    async def _do_step(self, batch: Batch, waited_s: float) -> None:
        if batch.number != self._control.step:
            raise FailedPrecondition(f"the buffer gave batch {batch.number} to a trainer at step {self._control.step}")
        samples = await self._buffer.fetch_samples(batch)
        self._control.phase = Phase.TRAINING
        trained = train_metrics([await self._worker.run(self._learner.train, batch, samples)])
        kill_point("trainer_after_optimizer_step")
        await self._buffer.ack_batch(self._control.run_epoch, batch)
        kill_point("trainer_after_ack")
        self._digests.append(batch.digest)
        self._control.step += 1
        times = {"time/wait_batch_seconds": waited_s, "time/publish_seconds": await self._publish()}
        self._record({**batch.rollout_metrics, **trained, **times})
        if self._control.step % self._spec.trainer.save_interval == 0:
            await self._save()

    def _record(self, values: Metrics) -> None:
        """Before the step's checkpoint: a trainer that goes on from it does not repeat the step."""
        values = {**values, "time/save_seconds": self._saving_s}
        self._saving_s = 0.0
        self._metrics.write(self._control.step, self._control.run_epoch, values)
        self._control.finish_step(values)
        log.info("step done", step=self._control.step, reward=round(values["rollout/mean_reward"], 4))

    async def _save(self) -> None:
        """Checkpoint the step, commit it, and let go of old ones."""
        begun = time.monotonic()
        self._control.phase = Phase.SAVING
        step = self._control.step
        state = RunState(step, self._spec.digest(), tuple(self._digests))
        path = await self._worker.run(checkpoint.save, self._root, self._learner, state)
        kill_point("trainer_after_checkpoint")
        await self._buffer.commit(self._control.run_epoch, step, str(path))
        kill_point("trainer_after_commit")
        self._saved_step = self._control.committed_step = step
        await self._worker.run(checkpoint.remove_old, self._root, self._spec.trainer.keep_checkpoints)
        self._control.answer_saves(Saved(step, str(path)))
        self._saving_s += time.monotonic() - begun

    async def _finish(self) -> None:
        """Nothing is left to train on: make the result durable, let the evaluation end, export, end the run."""
        if self._saved_step != self._control.step:
            await self._save()
        if self._spec.evaluation.sets:
            await self._until_evaluated()
        target = self._spec.run_dir / "hf"
        await self._worker.run(export_hf, self._learner, self._spec.model.hf_checkpoint, target)
        await self._buffer.stop_run()
        log.info("the run is complete", step=self._control.step, hf_checkpoint=str(target))

    async def _until_evaluated(self) -> None:
        deadline = time.monotonic() + self._spec.evaluation.deadline_s + EVALUATION_MARGIN_S
        while not await self._buffer.evaluation_complete(self._control.step):
            if time.monotonic() >= deadline:
                log.warning("the last evaluation did not end in time", step=self._control.step)
                return
