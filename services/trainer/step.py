"""One rollout step: log-probs of the weights before it, then its optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.spec import RunSpec
from services.trainer import hf_mapping, loss
from services.trainer.batch import Batch, Sample
from services.trainer.layout import Layout, vocabulary_part
from services.trainer.log_probs import token_log_probs, token_log_probs_and_entropy
from services.trainer.megatron import DEVICE, gather_from_sequence_parallel_region, get_forward_backward_func
from services.trainer.model import DTYPES, ONE_RANK, PolicyModel, build_model
from services.trainer.model_config import ModelConfig
from services.trainer.optimizer import Optimizer, learning_rate
from services.trainer.packing import Pack, make_pack

Metrics = dict[str, float]


class Learner:
    """The model, its optimizer, and how one batch changes them. Lives in one thread, after `megatron.initialize`."""

    def __init__(self, spec: RunSpec, model: ModelConfig, layout: Layout = ONE_RANK) -> None:
        self.model = model
        self.layout = layout
        self.module: PolicyModel = build_model(model, DTYPES[spec.trainer.dtype], layout)
        self.optimizer = Optimizer(self.module, spec.optimizer)
        self._spec = spec

    def load_initial_weights(self) -> None:
        """Start from the Hugging Face checkpoint of the run spec."""
        hf_mapping.load_hf(self.module, self.model, self._spec.model.hf_checkpoint)
        self.optimizer.reload()

    def train(self, batch: Batch, samples: Sequence[Sample]) -> Metrics:
        """Train on one batch; `samples` are by row. Returns its `train/` metrics.

        Raises:
            ValueError: A sample does not fit its row, or has a token outside the vocabulary.
        """
        start = time.monotonic()
        steps = self._packs_by_step(batch, samples)
        log_probs, observed = self._observe([pack for packs in steps for pack in packs], batch.optimizer_steps)
        old, first = iter(log_probs), batch.number * batch.optimizer_steps
        optimized = _summarize([self._optimize(packs, old, first + index) for index, packs in enumerate(steps)])
        spent = time.monotonic() - start
        tokens = sum(len(one.prompt) + len(one.response) for one in samples)
        return {
            **observed,
            **optimized,
            "train/lr": learning_rate(self._spec.optimizer, first + len(steps) - 1),
            "train/seconds": spent,
            "train/tokens_per_second": tokens / spent,
        }

    def _packs_by_step(self, batch: Batch, samples: Sequence[Sample]) -> list[list[Pack]]:
        _check_tokens(samples, self.model.vocabulary)
        steps: list[list[Pack]] = [[] for _ in range(batch.optimizer_steps)]
        for micro_batch in batch.micro_batches:
            steps[micro_batch.optimizer_step].append(make_pack(batch, micro_batch, samples, DEVICE, self.layout.tensor))
        return steps

    @torch.no_grad()
    def _observe(self, packs: list[Pack], optimizer_steps: int) -> tuple[list[Tensor], Metrics]:
        """Log-probs of every pack under the weights as they are, and what they say about the policy."""
        outputs = self._run(packs, self._observe_step, forward_only=True)
        rows = [_observations(pack, *output) for pack, output in zip(packs, outputs, strict=True)]
        found = _to_floats(rows)
        metrics = {
            "train/entropy": sum(found["entropy"]) / optimizer_steps,
            "train/log_prob_gap_mean": sum(found["gap_sum"]) / max(1.0, sum(found["tokens"])),
            "train/log_prob_gap_max": max(found["gap_max"]),
        }
        return [log_probs for log_probs, _ in outputs], metrics

    def _optimize(self, packs: list[Pack], old_log_probs: Iterator[Tensor], number: int) -> Metrics:
        """Optimizer step `number` of the run; takes one entry of `old_log_probs` for each pack."""
        self.optimizer.zero_gradients()
        sums = self._run(packs, partial(self._train_step, old_log_probs), forward_only=False)
        result = self.optimizer.step(number)
        total = {name: sum(values) for name, values in _to_floats(sums).items()}
        return {**total, "train/grad_norm": result.grad_norm, "train/skipped_steps": float(not result.applied)}

    def _run(self, packs: list[Pack], forward_step: Any, forward_only: bool) -> list[Any]:
        """Megatron's schedule over the packs."""
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(packs),
            model=self.optimizer.ddp,
            num_microbatches=len(packs),
            seq_length=packs[0].segments.max_seqlen_q,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(self, model: Any, pack: Pack, score: Any) -> Any:
        """What `score` makes of the hidden states before, and the weight of the output layer, and the targets."""
        return model(
            pack.tokens,
            pack.position_ids,
            None,
            packed_seq_params=pack.segments,
            output_processor=self._score_responses,
            output_processor_context=(pack, score),
        )

    def _score_responses(
        self,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: tuple[Pack, Any],
        **_: Any,
    ) -> Any:
        """Megatron's hook after the last layer; `hidden_states` are `[T, 1, hidden]`, or this rank's part of T."""
        pack, score = context
        weight = output_layer.weight if output_weight is None else output_weight
        if self.layout.tensor > 1:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        hidden = hidden_states.squeeze(1).index_select(0, pack.places)
        return score(hidden, weight, pack.targets, self._spec.rollout.temperature, vocabulary_part(weight.shape[0]))

    def _observe_step(self, packs: Iterator[Pack], model: Any) -> tuple[Tensor, None]:
        return torch.stack(self._forward(model, next(packs), token_log_probs_and_entropy)), None

    def _train_step(self, old: Iterator[Tensor], packs: Iterator[Pack], model: Any) -> tuple[Tensor, Any]:
        pack, old_log_probs = next(packs), next(old)
        log_probs = self._forward(model, pack, token_log_probs)
        return log_probs, partial(self._loss, pack, old_log_probs)

    def _loss(self, pack: Pack, old_log_probs: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss of a pack as Megatron wants it: the sum, a count that we do not use, and numbers to report."""
        clip = self._spec.algorithm
        losses, clipped = loss.policy_loss(log_probs, old_log_probs, pack.advantages, clip.eps_clip, clip.eps_clip_high)
        total = (losses * pack.weights).sum()
        report = {
            "train/loss": total.detach(),
            "train/pg_clipfrac": (clipped * pack.weights).sum(),
            "train/ppo_kl": ((old_log_probs - log_probs.detach()) * pack.weights).sum(),
        }
        return total, torch.zeros((), dtype=torch.int, device=total.device), report


def _check_tokens(samples: Sequence[Sample], vocabulary: int) -> None:
    """Before CUDA meets a token that has no embedding, which would end the process."""
    for row, one in enumerate(samples):
        for token in (*one.prompt, *one.response):
            if not 0 <= token < vocabulary:
                raise ValueError(f"sample of row {row}: token {token} is outside the vocabulary of {vocabulary}")


def _observations(pack: Pack, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Sums and maxima over the tokens of a pack."""
    gaps = (log_probs - pack.rollout_log_probs).abs() * pack.mask
    return {
        "tokens": pack.mask.sum(),
        "entropy": (entropy * pack.weights).sum(),
        "gap_sum": gaps.sum(),
        "gap_max": F.pad(gaps, (0, 1)).max(),
    }


def _to_floats(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, list[float]]:
    """Scalars of several packs, by name; one wait for the device in all."""
    columns = torch.stack([torch.stack(list(row.values())) for row in rows]).T.tolist()
    return dict(zip(rows[0], columns, strict=True))


def _summarize(steps: list[Metrics]) -> Metrics:
    """Means over optimizer steps; the gradient norm over those applied, and the number of those skipped."""
    mean = {name: sum(one[name] for one in steps) / len(steps) for name in steps[0]}
    skipped = sum(one["train/skipped_steps"] for one in steps)
    norm = sum(one["train/grad_norm"] for one in steps) / max(1.0, len(steps) - skipped)
    return {**mean, "train/grad_norm": norm, "train/skipped_steps": skipped}
