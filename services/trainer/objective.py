"""What a run minimises: a loss for each token, of which a pack's weights make a mean."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.common.spec import RunSpec, TrainingSpec
from services.trainer.loss import policy_loss
from services.trainer.packing import Pack


class Objective(Protocol):
    """A loss, and what else is worth a report; all are `[R]`, named as the fields of a report."""

    temperature: float
    """Divides the logits."""
    needs_old: bool
    """Whether the log-probs of the weights before the batch are asked for."""

    def __call__(self, pack: Pack, log_probs: Tensor, old_log_probs: Tensor | None) -> dict[str, Tensor]:
        """`loss`, through which gradients flow to `log_probs`, and numbers without gradient."""
        ...


class Surrogate:
    """GRPO's: the clipped surrogate of the advantages."""

    needs_old = True

    def __init__(self, spec: RunSpec) -> None:
        self.temperature = spec.rollout.temperature
        self._clip = spec.algorithm

    def __call__(self, pack: Pack, log_probs: Tensor, old_log_probs: Tensor | None) -> dict[str, Tensor]:
        """Losses, 1 where the clip took effect, and old minus current log-prob."""
        assert old_log_probs is not None, "they were observed"
        losses, clipped = policy_loss(
            log_probs, old_log_probs, pack.advantages, self._clip.eps_clip, self._clip.eps_clip_high
        )
        return {"loss": losses, "pg_clipfrac": clipped, "ppo_kl": old_log_probs - log_probs.detach()}


class Likelihood:
    """Supervised learning's: the negative log-likelihood."""

    temperature = 1.0
    needs_old = False

    def __call__(self, pack: Pack, log_probs: Tensor, old_log_probs: Tensor | None) -> dict[str, Tensor]:
        """Losses in nats."""
        return {"loss": -log_probs}


def objective_of(spec: TrainingSpec) -> Objective:
    """What a run of this kind minimises."""
    return Surrogate(spec) if isinstance(spec, RunSpec) else Likelihood()
