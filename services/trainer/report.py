"""What one rank saw of a batch, and what all ranks together make of it: the `train/` metrics.

Only the ranks that compute the loss have sums of their own: those of the last stage, one of each tensor-parallel
group. Context-parallel ranks each have those of their part of the tokens. Everything else is zero, so that sums add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class MicroBatchId:
    """One micro-batch of a rank."""

    optimizer_step: int
    """In the batch, from 0."""
    index: int
    """In the optimizer step, from 0."""


@dataclass(slots=True)
class Report:
    """One rank's part in the training on one batch."""

    tokens: int = 0
    """Prompt and response tokens."""
    masked_tokens: float = 0.0
    """Response tokens that count."""
    entropy: float = 0.0
    """Sum over optimizer steps of the mean over rollouts, in nats."""
    gap: float = 0.0
    """Sum over counted tokens of the difference between trainer's and engine's log-prob."""
    gap_max: float = 0.0
    loss: float = 0.0
    """This and the next three: sum over optimizer steps of the mean over rollouts."""
    pg_clipfrac: float = 0.0
    ppo_kl: float = 0.0
    mtp_loss: float = 0.0
    """Of multi-token prediction, without its factor."""
    grad_norms: list[float] = field(default_factory=list)
    """Of each optimizer step, of the whole model but for multi-token prediction; 0 where it was skipped."""
    mtp_grad_norm: float = 0.0
    """Of the layer for multi-token prediction, summed over optimizer steps, as above."""
    lr: float = 0.0
    """Of the last optimizer step."""
    skipped_steps: list[int] = field(default_factory=list)
    """Optimizer steps of the batch that were not applied, because a gradient was not finite."""
    not_finite: list[MicroBatchId] = field(default_factory=list)
    """Micro-batches of these whose loss was not finite here."""
    seconds: float = 0.0
    busy_seconds: float = 0.0
    """Of these, until the gradients were ready to be summed over ranks."""


def train_metrics(reports: Sequence[Report]) -> Metrics:
    """The `train/` metrics of a batch, from the reports of all ranks."""
    steps = len(reports[0].grad_norms)
    skipped = len(reports[0].skipped_steps)
    applied = max(1, steps - skipped)
    seconds = max(one.seconds for one in reports)
    busy = [one.busy_seconds for one in reports]
    return {
        "train/loss": sum(one.loss for one in reports) / steps,
        "train/pg_clipfrac": sum(one.pg_clipfrac for one in reports) / steps,
        "train/ppo_kl": sum(one.ppo_kl for one in reports) / steps,
        "train/entropy": sum(one.entropy for one in reports) / steps,
        "train/grad_norm": sum(reports[0].grad_norms) / applied,
        "train/mtp_loss": sum(one.mtp_loss for one in reports) / steps,
        "train/mtp_grad_norm": reports[0].mtp_grad_norm / applied,
        "train/lr": reports[0].lr,
        "train/skipped_steps": float(skipped),
        "train/seconds": seconds,
        "train/tokens_per_second": sum(one.tokens for one in reports) / seconds,
        "train/log_prob_gap_mean": sum(one.gap for one in reports)
        / max(1.0, sum(one.masked_tokens for one in reports)),
        "train/log_prob_gap_max": max(one.gap_max for one in reports),
        "train/slowest_rank": max(busy) / fmean(busy),
    }
