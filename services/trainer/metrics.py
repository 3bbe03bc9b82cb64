"""Metrics of finished rollout steps: metrics.jsonl, TensorBoard, Prometheus."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from prometheus_client import Gauge
from tensorboard.summary import Writer

STEP_METRICS = {
    "rollout/mean_reward": "mean reward over every graded sample since the last seal",
    "rollout/kept_groups": "groups kept since the last seal",
    "rollout/dropped_groups": "groups dropped since the last seal",
    "rollout/mean_response_tokens": "mean response length of the batch",
    "rollout/truncated_ratio": "share of responses that ended by length",
    "rollout/seconds": "seconds from the first lease for the batch to its seal",
    "rollout/tokens_per_second": "response tokens generated per second of rollout",
    "rollout/max_age": "batch number minus the oldest step in its spans",
    "rollout/mixed_version_samples": "samples of the batch with tokens of more than one policy version",
    "rollout/dead_epoch_samples": "samples of the batch with tokens of an epoch before the live one",
    "rollout/packing_efficiency": "tokens of the batch over what its micro-batches could hold",
    "rollout/imbalance": "work of the most loaded data-parallel rank over the ranks' mean",
    "train/loss": "mean of the optimizer steps' losses",
    "train/pg_clipfrac": "share of tokens where the clip took effect",
    "train/ppo_kl": "mean of old minus current log-prob",
    "train/entropy": "entropy in nats before the step",
    "train/grad_norm": "mean global gradient norm before clipping, of the optimizer steps that were applied",
    "train/mtp_loss": "mean negative log-likelihood of the response by multi-token prediction, in nats; 0 if frozen",
    "train/mtp_grad_norm": "as train/grad_norm, of the layer for multi-token prediction",
    "train/lr": "learning rate of the last optimizer step",
    "train/skipped_steps": "optimizer steps skipped because a gradient was not finite",
    "train/seconds": "seconds of log-probs and optimizer steps",
    "train/tokens_per_second": "prompt and response tokens per second of training",
    "train/log_prob_gap_mean": "mean absolute difference between trainer's and engine's log-prob before the step",
    "train/log_prob_gap_max": "largest such difference",
    "train/slowest_rank": "longest time of a rank until its gradients were ready, over the mean of the ranks",
    "time/wait_batch_seconds": "seconds waited for the batch",
    "time/publish_seconds": "seconds to export the weights, have the agent read them and publish them",
    "time/save_seconds": "seconds spent since the step before on writing checkpoints and committing them",
}
"""Every metric of a rollout step, and what it means."""

_STEP_GAUGE = Gauge("flotilla_trainer_step", "Rollout steps done")


@cache
def _gauge(name: str, meaning: str) -> Gauge:
    return Gauge(f"flotilla_trainer_{name.replace('/', '_')}", meaning.capitalize())


class MetricsWriter:
    """Appends one row for each step; a restarted trainer goes on in the same files."""

    def __init__(self, run_dir: Path, metrics: Mapping[str, str] = STEP_METRICS) -> None:
        """Open the files. `metrics` are what a step has, with their meanings."""
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        drop_torn_line(path)
        self._file = path.open("a")
        self._board = Writer(str(run_dir / "tensorboard"))
        self._gauges = {name: _gauge(name, meaning) for name, meaning in metrics.items()}

    def write(self, step: int, run_epoch: int, values: dict[str, float]) -> None:
        """Record a step; `values` are all that a step has."""
        assert values.keys() == self._gauges.keys(), values.keys() ^ self._gauges.keys()
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        row = {"step": step, "run_epoch": run_epoch, "time": time.time(), **finite}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        _STEP_GAUGE.set(step)
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
            self._gauges[name].set(value)
        self._board.flush()

    def close(self) -> None:
        """Finish both files."""
        self._file.close()
        self._board.close()


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that a killed writer left without its end."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
        os.fsync(file.fileno())
