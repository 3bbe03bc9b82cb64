"""One rollout step: log-probs of the weights before it, then its optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.spec import TrainingSpec
from services.trainer.batch import Batch, Samples
from services.trainer.log_probs import token_log_probs_and_entropy
from services.trainer.model_config import ModelConfig
from services.trainer.mtp import fetch_embedding
from services.trainer.optimizer import Optimizer, learning_rate
from services.trainer.packing import Pack
from services.trainer.policy import Policy, computes_loss, to_floats
from services.trainer.progress import Progress
from services.trainer.report import MicroBatchId, Report


class Learner(Policy):
    """A policy with its optimizer, and how one batch changes them."""

    def __init__(self, spec: TrainingSpec, model: ModelConfig, progress: Progress | None = None) -> None:
        super().__init__(spec, model, progress)
        self.optimizer = Optimizer(self.chunks, spec.optimizer, spec.parallel.overlap)

    @property
    def _called(self) -> Sequence[torch.nn.Module]:
        """What holds the gradients, one for each chunk."""
        return self.optimizer.ddp

    def load_initial_weights(self) -> None:
        """As a policy does, with the optimizer anew."""
        super().load_initial_weights()
        self.optimizer.reload()

    def train(self, batch: Batch, samples: Samples) -> Report:
        """Train on this rank's part of a batch, with all other ranks. Arguments and errors are those of `evaluate`."""
        start = time.monotonic()
        steps = self._packs_by_step(batch, samples)
        report = Report()
        old = repeat(None)
        if self._objective.needs_old:
            old = iter(self._observe([pack for packs in steps for pack in packs], report))
        for index, packs in enumerate(steps):
            self._optimize(packs, old, batch.number * batch.optimizer_steps + index, index, report)
        self.optimizer.fetch_weights()
        report.seconds = time.monotonic() - start
        if computes_loss() and self._context.rank == 0:
            mine = (samples[row] for one in batch.micro_batches for row in one.rows)
            report.tokens = sum(len(one.prompt) + len(one.response) for one in mine)
        return report

    @torch.no_grad()
    def _observe(self, packs: list[Pack], report: Report) -> list[Tensor]:
        """Log-probs of every pack under the weights as they are, and what they say about the policy.

        Empty before the last stage.
        """
        outputs = self._run(packs, self._observe_step, forward_only=True)
        if not computes_loss():
            return [log_probs for log_probs, _ in outputs] or [torch.empty(0)] * len(packs)
        found = to_floats([_observations(pack, *output) for pack, output in zip(packs, outputs, strict=True)])
        report.masked_tokens, report.entropy = sum(found["tokens"]), sum(found["entropy"])
        report.gap, report.gap_max = sum(found["gap"]), max(found["gap_max"])
        return [log_probs for log_probs, _ in outputs]

    def _optimize(
        self, packs: list[Pack], old_log_probs: Iterator[Tensor | None], number: int, index: int, report: Report
    ) -> None:
        """Optimizer step `number` of the run and `index` of the batch; takes one of `old_log_probs` for each pack."""
        start = time.monotonic()
        self.optimizer.zero_gradients()
        if self.model.mtp_built:
            fetch_embedding(self.chunks)
        items = [(pack, next(old_log_probs)) for pack in packs]
        sums = self._run(items, self._train_step, forward_only=False)
        report.busy_seconds += self.optimizer.ready_s - start
        self._progress.begin("optimizer step")
        result = self.optimizer.step(number)
        report.lr = learning_rate(self._spec.optimizer, number)
        report.grad_norms.append(result.grad_norm)
        report.mtp_grad_norm += result.mtp_grad_norm
        if not result.applied:
            report.skipped_steps.append(index)
        if not computes_loss():
            return
        found = to_floats(sums)
        for name, values in found.items():
            setattr(report, name, getattr(report, name) + sum(values))
        losses = zip(*(found[name] for name in ("loss", "mtp_loss") if name in found), strict=True)
        report.not_finite += [MicroBatchId(index, at) for at, one in enumerate(losses) if not all(map(isfinite, one))]

    def _observe_step(self, packs: Iterator[Pack], model: Any) -> tuple[Tensor, None]:
        return self._forward(model, next(packs), _log_probs_and_entropy), None


def _log_probs_and_entropy(*args: Any) -> Tensor:
    """`[2, R]`: Megatron passes on tensors only."""
    return torch.stack(token_log_probs_and_entropy(*args))


def _observations(pack: Pack, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Sums and maxima over the tokens of a pack."""
    gaps = (log_probs - pack.rollout_log_probs).abs() * pack.mask
    return {
        "tokens": pack.mask.sum(),
        "entropy": (entropy * pack.weights).sum(),
        "gap": gaps.sum(),
        "gap_max": F.pad(gaps, (0, 1)).max(),
    }
