"""One rollout step: log-probs of the weights before it, then its optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.common.spec import TrainingSpec
from services.trainer import hf_mapping
from services.trainer.batch import Batch, Samples, check_tokens
from services.trainer.layout import context_rank, vocabulary_part
from services.trainer.loading import load_weights
from services.trainer.log_probs import token_log_probs, token_log_probs_and_entropy
from services.trainer.megatron import (
    DEVICE,
    gather_from_sequence_parallel_region,
    get_forward_backward_func,
    parallel_state,
    weight_of,
)
from services.trainer.model import DTYPES, PolicyModel, build_model
from services.trainer.model_config import ModelConfig
from services.trainer.mtp import fetch_embedding
from services.trainer.objective import objective_of
from services.trainer.optimizer import Optimizer, learning_rate
from services.trainer.packing import Ahead, Pack, make_pack
from services.trainer.progress import Progress
from services.trainer.report import MicroBatchId, Report


class Policy:
    """A model and its loss over batches. Lives in one thread, after `megatron.initialize`."""

    def __init__(self, spec: TrainingSpec, model: ModelConfig, progress: Progress | None = None) -> None:
        self.model = model
        self.chunks: list[PolicyModel] = build_model(model, DTYPES[spec.trainer.dtype], spec.parallel)
        self._objective = objective_of(spec)
        self._progress = progress or Progress()
        self._spec, self._parallel, self._context = spec, spec.parallel, context_rank()

    @property
    def _called(self) -> Sequence[torch.nn.Module]:
        """What Megatron's schedule calls, one for each chunk."""
        return self.chunks

    def load_initial_weights(self) -> None:
        """Start from the torch_dist directory of the run spec, or else from its Hugging Face checkpoint."""
        source = self._spec.model
        if source.load != Path():
            load_weights(source.load, self.chunks)
        else:
            hf_mapping.load_hf(self.chunks, self.model, source.hf_checkpoint)

    @torch.no_grad()
    def evaluate(self, batch: Batch, samples: Samples) -> float:
        """This rank's part of the loss over a batch of one optimizer step, which is not done.

        Args:
            batch: With the micro-batches of this rank.
            samples: Those of its micro-batches at least, by row.

        Raises:
            ValueError: A sample does not fit its row, or has a token outside the vocabulary; or the micro-batches of an
                optimizer step do not fit the layout.
        """
        (packs,) = self._packs_by_step(batch, samples)
        sums = self._run([(pack, None) for pack in packs], self._train_step, forward_only=True)
        return sum(_to_floats(sums)["loss"]) if computes_loss() else 0.0

    def _packs_by_step(self, batch: Batch, samples: Samples) -> list[list[Pack]]:
        check_tokens(batch, samples, self.model.vocabulary)
        steps: list[list[Pack]] = [[] for _ in range(batch.optimizer_steps)]
        ahead = self.model.mtp_built and torch.is_grad_enabled()  # what is only evaluated, it does not change
        for micro_batch in batch.micro_batches:
            pack = make_pack(batch, micro_batch, samples, DEVICE, self._parallel.tensor, self._context, ahead=ahead)
            steps[micro_batch.optimizer_step].append(pack)
        for index, packs in enumerate(steps):
            self._check_count(index, len(packs))
        return steps

    def _check_count(self, index: int, micro_batches: int) -> None:
        multiple = self._parallel.micro_batch_multiple
        if micro_batches % multiple:
            raise ValueError(
                f"optimizer step {index} has {micro_batches} micro-batches on this rank, with parallel.virtual_stages "
                f"they must be a multiple of parallel.pipeline = {multiple}"
            )

    def _run(self, items: Sequence[Any], forward_step: Any, forward_only: bool) -> list[Any]:
        """Megatron's schedule over packs, and what goes with them. Lengths differ, so stages tell each other theirs."""
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self._iterators(items, "log-probs" if forward_only else "training"),
            model=[*self._called],
            num_microbatches=len(items),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _iterators(self, items: Sequence[Any], what: str) -> list[Iterator[Any]]:
        """One for each chunk; the first says where it is."""
        return [self._announced(items, what), *(iter(items) for _ in self.chunks[1:])]

    def _announced(self, items: Sequence[Any], what: str) -> Iterator[Any]:
        for at, item in enumerate(items):
            self._progress.begin(f"{what}, micro-batch {at}")
            yield item

    def _forward(self, model: Any, pack: Pack, score: Any, ahead: Ahead | None = None) -> Any:
        """What `score` makes of the hidden states before, and the weight of the output layer, and the targets.

        With `ahead` also the log-probs of multi-token prediction, after the others.
        """
        return model(
            pack.tokens,
            pack.position_ids,
            None,
            packed_seq_params=pack.segments,
            output_processor=self._score_responses,
            output_processor_context=(pack, score, ahead),
        )

    def _score_responses(
        self,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: tuple[Pack, Any, Ahead | None],
        **_: Any,
    ) -> Any:
        """Megatron's hook after the last layer; `hidden_states` are `[T, 1, hidden]`, or this rank's part of T."""
        pack, score, ahead = context
        own = weight_of(output_layer)
        weight = own if output_weight is None else output_weight
        part = vocabulary_part(weight.shape[0])
        hidden = self._pick(hidden_states, pack.places)
        scores = score(hidden, weight, pack.targets, self._objective.temperature, part)
        if ahead is None:
            return scores
        predicted = self.chunks[-1].predict_ahead(hidden_states, ahead.tokens, pack.position_ids, pack.segments)
        hidden = self._pick(predicted, ahead.places)
        return torch.cat([scores, token_log_probs(hidden, weight.detach(), ahead.targets, 1.0, part)])

    def _pick(self, hidden_states: Tensor, places: Tensor) -> Tensor:
        """`[places, hidden]` of all tokens of the pack."""
        if self._parallel.tensor > 1:
            hidden_states = gather_from_sequence_parallel_region(hidden_states)
        return hidden_states.squeeze(1).index_select(0, places)

    def _train_step(self, items: Iterator[tuple[Pack, Tensor | None]], model: Any) -> tuple[Tensor, Any]:
        pack, old_log_probs = next(items)
        log_probs = self._forward(model, pack, token_log_probs, pack.ahead)
        return log_probs, partial(self._loss, pack, old_log_probs)

    def _loss(
        self, pack: Pack, old_log_probs: Tensor | None, log_probs: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss of a pack as Megatron wants it: the sum, a count that we do not use, and numbers to report."""
        log_probs, predicted = log_probs.tensor_split([len(pack.targets)])
        values = self._objective(pack, log_probs, old_log_probs)
        sums = {name: (one * pack.weights).sum() for name, one in values.items()}
        total = sums["loss"]
        if pack.ahead is not None:
            sums["mtp_loss"] = -(predicted * pack.ahead.weights).sum()
            total = total + self._spec.trainer.mtp_loss_scaling_factor * sums["mtp_loss"]
        counted = torch.zeros((), dtype=torch.int, device=total.device)
        return total, counted, {name: one.detach() for name, one in sums.items()}


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
        found = _to_floats([_observations(pack, *output) for pack, output in zip(packs, outputs, strict=True)])
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
        found = _to_floats(sums)
        for name, values in found.items():
            setattr(report, name, getattr(report, name) + sum(values))
        losses = zip(*(found[name] for name in ("loss", "mtp_loss") if name in found), strict=True)
        report.not_finite += [MicroBatchId(index, at) for at, one in enumerate(losses) if not all(map(isfinite, one))]

    def _observe_step(self, packs: Iterator[Pack], model: Any) -> tuple[Tensor, None]:
        return self._forward(model, next(packs), _log_probs_and_entropy), None


def _log_probs_and_entropy(*args: Any) -> Tensor:
    """`[2, R]`: Megatron passes on tensors only."""
    return torch.stack(token_log_probs_and_entropy(*args))


def computes_loss() -> bool:
    """Whether this rank's losses count: of a tensor-parallel group, which computes the same, only the first's do."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def _observations(pack: Pack, log_probs: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """Sums and maxima over the tokens of a pack."""
    gaps = (log_probs - pack.rollout_log_probs).abs() * pack.mask
    return {
        "tokens": pack.mask.sum(),
        "entropy": (entropy * pack.weights).sum(),
        "gap": gaps.sum(),
        "gap_max": F.pad(gaps, (0, 1)).max(),
    }


def _to_floats(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, list[float]]:
    """Scalars of several packs, by name; one wait for the device in all."""
    columns = torch.stack([torch.stack(list(row.values())) for row in rows]).T.tolist()
    return dict(zip(rows[0], columns, strict=True))
