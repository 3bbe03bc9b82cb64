"""A run of supervised fine-tuning, from the start or the newest checkpoint to the exported model.

    data file ──► samples ──┐                  ┌── every save_interval: checkpoint
                            ▼                  │
    checkpoint or ─────► batch, schedule ──► optimizer step ──► metrics ──► ... ──► run_dir/hf
    HF weights

All ranks do the same: each reads the whole file, and trains on its own micro-batches. A kill at any point loses at most
the steps since the last checkpoint, and what is done again has the same samples in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from services.common.errors import FailedPrecondition
from services.common.kill_points import kill_point
from services.common.logs import get_logger
from services.common.run_checkpoints import CHECKPOINTS, checkpoint_path, checkpoint_steps
from services.common.schedule import Layout
from services.common.spec import RUN_FILE, SpecError, check_same_run
from services.common.spec.sft import SPEC_FILE, SftSpec, load_sft
from services.trainer import checkpoint, megatron
from services.trainer.checkpoint import RunState
from services.trainer.export import export_hf
from services.trainer.flops import forward_flops
from services.trainer.loading import CheckpointError
from services.trainer.megatron import parallel_state
from services.trainer.metrics import STEP_METRICS, MetricsWriter
from services.trainer.model_config import ModelConfig
from services.trainer.ranks import all_ranks, held, on_first_rank
from services.trainer.report import Metrics, train_metrics
from services.trainer.run_model import run_model
from services.trainer.sft.data import SftData, load_data
from services.trainer.sft.samples import SftBatch, batch_digest, make_batch
from services.trainer.step import Learner

SFT_METRICS = {
    "data/epoch": "epochs done",
    "data/samples": "samples of the batch",
    "data/learned_tokens": "tokens of the batch that the loss counts",
    "data/packing_efficiency": STEP_METRICS["rollout/packing_efficiency"],
    "data/imbalance": STEP_METRICS["rollout/imbalance"],
    "train/loss": "mean negative log-likelihood of these tokens before the step, in nats",
    "train/grad_norm": STEP_METRICS["train/grad_norm"],
    "train/mtp_loss": STEP_METRICS["train/mtp_loss"],
    "train/mtp_grad_norm": STEP_METRICS["train/mtp_grad_norm"],
    "train/lr": STEP_METRICS["train/lr"],
    "train/skipped_steps": STEP_METRICS["train/skipped_steps"],
    "train/seconds": STEP_METRICS["train/seconds"],
    "train/tokens_per_second": STEP_METRICS["train/tokens_per_second"],
    "train/slowest_rank": STEP_METRICS["train/slowest_rank"],
    "time/save_seconds": "seconds spent since the step before on writing checkpoints",
}
"""Every metric of a step of supervised fine-tuning, and what it means."""

LOCK_FILE = "sft.lock"
"""In the directory of a run."""

log = get_logger(__name__)


def train(spec: SftSpec) -> None:
    """Train to the end of the run; every rank calls it.

    Raises:
        SpecError: Data, model or layout cannot be used.
        FailedPrecondition: The model is not supported, a checkpoint of the run cannot be continued, or another process
            trains in the directory of the run.
    """
    for field in ("tensor", "context", "pipeline", "expert", "expert_tensor"):
        if (size := getattr(spec.parallel, field)) > 1:
            raise SpecError(
                f"parallel.{field} = {size}: supervised fine-tuning does not cut the model, every rank has all of it; "
                "leave it out, and start more ranks for more speed (docs/sft.md)"
            )
    if spec.trainer.num_threads:
        torch.set_num_threads(spec.trainer.num_threads)
    model = run_model(spec)
    megatron.initialize(spec.trainer.seed, spec.parallel, spec.trainer.hang_timeout_s)
    try:
        with writing_to(spec.run_dir):
            on_first_rank(partial(check_run_dir, spec))
            data = load_data(spec.data, spec.model.hf_checkpoint, model.vocabulary)
            SftRun(spec, model, data).run()
    finally:
        megatron.destroy()


@contextmanager
def writing_to(run_dir: Path) -> Iterator[None]:
    """Have rank 0 hold the directory of the run while the block runs.

    Raises:
        FailedPrecondition: Another process holds it, or a file cannot be written.
    """
    try:
        with held(run_dir / LOCK_FILE, "wait for its end, or give this run a run_dir of its own"):
            yield
    except OSError as error:
        raise FailedPrecondition(f"run_dir {run_dir}: {error}") from error


def check_run_dir(spec: SftSpec) -> None:
    """Raise SpecError, naming the fields, if the directory holds another run."""
    if (other := spec.run_dir / RUN_FILE).is_file():
        raise SpecError(f"run_dir: {other} is there, of a run of `flotilla up`; take another run_id or run_dir")
    check_same_run(spec, spec.run_dir / SPEC_FILE, load_sft)


class SftRun:
    """One life of a run."""

    def __init__(self, spec: SftSpec, model: ModelConfig, data: SftData) -> None:
        self._spec, self._data = spec, data
        self._batches = data.batches(spec)
        self._root = spec.run_dir / CHECKPOINTS
        self._layout = batch_layout(spec, model)
        self._learner = Learner(with_decay(spec, self._batches), model)
        self._metrics: MetricsWriter | None = None
        """Of rank 0."""
        self._digests: list[str] = []
        """Of the batches that were trained on."""
        self._saving_s = 0.0

    def run(self) -> None:
        """Train, save, export."""
        self._load()
        if megatron.rank() == 0:
            self._metrics = MetricsWriter(self._spec.run_dir, SFT_METRICS)
            (self._spec.run_dir / SPEC_FILE).write_text(self._spec.to_toml())
        counts = {"samples": len(self._data.samples), "overlong": self._data.overlong}
        log.info("training starts", step=len(self._digests), steps=self._batches, **counts)
        while len(self._digests) < self._batches:
            self._do_step()
        self._finish()

    def _load(self) -> None:
        """From the newest checkpoint, or the initial weights."""
        if not (steps := checkpoint_steps(self._root)):
            self._learner.load_initial_weights()
            return
        path = checkpoint_path(self._root, steps[-1])
        state = checkpoint.load(path, self._learner, self._spec.digest())
        for number, digest in enumerate(state.batch_digests):
            if batch_digest(self._data.batch(number, self._spec)) != digest:
                raise CheckpointError(f"{path}: batch {number} had other samples; data.path has changed since")
        self._digests = list(state.batch_digests)

    def _batch(self, number: int) -> SftBatch:
        rank = parallel_state.get_data_parallel_rank()
        return make_batch(number, self._data.batch(number, self._spec), self._layout, rank)

    def _do_step(self) -> None:
        made = self._batch(len(self._digests))
        report = self._learner.train(made.batch, made.samples)
        kill_point("trainer_after_optimizer_step")
        self._digests.append(made.batch.digest)
        self._record({**made.metrics, **train_metrics(all_ranks(report))})
        if len(self._digests) % self._spec.trainer.save_interval == 0:
            self._save()

    def _record(self, values: Metrics) -> None:
        """Before the step's checkpoint: a run that goes on from it does not repeat the step."""
        step = len(self._digests)
        used = min(step * self._spec.sft.batch_size / len(self._data.samples), self._spec.sft.epochs)
        values = {**values, "data/epoch": used, "time/save_seconds": self._saving_s}
        self._saving_s = 0.0
        if self._metrics is None:
            return
        self._metrics.write(step, 0, {name: values[name] for name in SFT_METRICS})
        log.info("step done", step=step, steps=self._batches, loss=round(values["train/loss"], 4))

    def _save(self) -> None:
        begun = time.monotonic()
        state = RunState(len(self._digests), self._spec.digest(), tuple(self._digests))
        checkpoint.save(self._root, self._learner, state)
        kill_point("trainer_after_checkpoint")
        if megatron.rank() == 0:
            checkpoint.remove_old(self._root, self._spec.trainer.keep_checkpoints)
        self._saving_s += time.monotonic() - begun

    def _finish(self) -> None:
        self._save()
        target = self._spec.run_dir / "hf"
        export_hf(self._learner, self._spec.model.hf_checkpoint, target, self._spec.model.overrides)
        if self._metrics is not None:
            self._metrics.close()
        log.info("the run is complete", step=len(self._digests), hf_checkpoint=str(target))


def with_decay(spec: SftSpec, steps: int) -> SftSpec:
    """A spec whose learning rate falls until the last of the run's steps, unless it says another one."""
    decay = {"lr_decay_steps": spec.optimizer.lr_decay_steps or steps}
    return spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update=decay)})


def batch_layout(spec: SftSpec, model: ModelConfig) -> Layout:
    """What batches are packed for. Megatron must be initialised."""
    flops = forward_flops(model)
    return Layout(
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        max_tokens_per_micro_batch=spec.trainer.max_tokens_per_micro_batch,
        balance_data=spec.trainer.balance_data,
        flops_per_token=flops.per_token,
        flops_per_token_squared=flops.per_token_squared,
    )
