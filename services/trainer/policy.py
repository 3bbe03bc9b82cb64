"""A model and its loss over batches, through Megatron's schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.common.spec import TrainingSpec
from services.trainer import hf_mapping
from services.trainer.batch import Batch, Samples, check_tokens
from services.trainer.layout import context_rank, vocabulary_part
from services.trainer.loading import load_weights
from services.trainer.log_probs import token_log_probs
from services.trainer.megatron import (
    DEVICE,
    gather_from_sequence_parallel_region,
    get_forward_backward_func,
    parallel_state,
    weight_of,
)
from services.trainer.model import DTYPES, PolicyModel, build_model
from services.trainer.model_config import ModelConfig
from services.trainer.objective import objective_of
from services.trainer.packing import Ahead, Pack, make_pack
from services.trainer.progress import Progress


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
        return sum(to_floats(sums)["loss"]) if computes_loss() else 0.0

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


def computes_loss() -> bool:
    """Whether this rank's losses count: of a tensor-parallel group, which computes the same, only the first's do."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


def to_floats(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, list[float]]:
    """Scalars of several packs, by name; one wait for the device in all."""
    columns = torch.stack([torch.stack(list(row.values())) for row in rows]).T.tolist()
    return dict(zip(rows[0], columns, strict=True))
