"""Tokens on their way to experts and back.

Megatron's dispatcher waits for the device in every layer, moves rows chunk by chunk, and adds up with atomics in any
order. Here a rank that has all experts never waits, ranks that share them do once a layer, for how many rows they send
each other; every move is one kernel, however many experts there are; and the same input gives the same bits.

Shapes: T tokens, K experts for each of them, E experts of this rank, R rows that these get, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.trainer.megatron import (
    MoEAlltoAllTokenDispatcher,
    MoELayer,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher, but for where it waits and how rows move."""

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count what goes where; `[E]` rows of each expert."""
        counts = super().preprocess(routing_map)
        # Of each rank, on the device, which Megatron's own is about to leave.
        self._chunks = self.num_global_tokens_per_local_expert if self._resorts else counts
        return counts

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        if self.ep_size * self.tp_size > 1:
            super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Give each token to its K experts: `[T * K, H]` and `[T * K]`, by expert.

        Args:
            hidden_states: `[..., H]`, T in all.
            routing_map: `[T, experts]`, whether a token goes to an expert, K times for each token.
            probs: `[T, experts]`, scores.
        """
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        rows = int(self.num_out_tokens)
        chosen = routing_map.T.flatten().argsort(descending=True, stable=True)[:rows]
        self._by_expert = Order(chosen % len(routing_map), len(routing_map))
        return self._by_expert.spread(hidden_states.flatten(0, -2)), probs.T.flatten().gather(0, chosen)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Any, ...]:
        """What experts get: rows by expert, which came by rank, how many of each, and scores."""
        rows, scores = (self._gather(one) for one in (global_input_tokens, global_probs))
        if self._resorts:
            experts = torch.arange(self._chunks.numel(), device=rows.device) % self.num_local_experts
            mine = experts.repeat_interleave(self._chunks.flatten(), output_size=len(rows))
            self._by_local_expert = Order(mine.argsort(stable=True), len(rows))
            rows, scores = self._by_local_expert.spread(rows), self._by_local_expert.spread(scores)
        return rows, self.tokens_per_expert, scores

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """What goes back to the ranks that the rows came from."""
        if self._resorts:
            hidden_states = self._by_local_expert.collect(hidden_states)
        if self.tp_size == 1:
            return hidden_states
        parts = {"group": self.tp_group, "input_split_sizes": self._tensor_splits()}
        return reduce_scatter_to_sequence_parallel_region(hidden_states.float(), **parts).to(hidden_states.dtype)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Add up what a token's experts made of it: `[T * K, H]` by expert, to the shape of the hidden states."""
        return self._by_expert.collect(permutated_local_input_tokens).view(self.hidden_shape)

    @property
    def _resorts(self) -> bool:
        """Whether rows for several experts come from several ranks."""
        return self.num_local_experts > 1 and self.ep_size * self.tp_size > 1

    def _gather(self, part: Tensor) -> Tensor:
        """The rows of all ranks that have a part of the same experts."""
        if self.tp_size == 1:
            return part
        sizes = self._tensor_splits()
        return gather_from_sequence_parallel_region(part, group=self.tp_group, output_split_sizes=sizes)

    def _tensor_splits(self) -> list[int]:
        splits: Any = self.output_splits_tp
        return splits.tolist()


class Order:
    """Tokens that go to places in an order of their own, each as often as the others, and come back from there."""

    def __init__(self, rows: Tensor, tokens: int) -> None:
        """`rows` are the tokens in that order, `[T * K]`, each K times; T is `tokens`, and may be 0."""
        self._rows = rows
        self._places = rows.argsort(stable=True).view(tokens, len(rows) // max(1, tokens))

    def spread(self, tokens: Tensor) -> Tensor:
        """`[T, ...]` -> `[T * K, ...]`."""
        spread: Any = _Spread.apply(tokens, self._rows, self._places)
        return spread

    def collect(self, spread: Tensor) -> Tensor:
        """`[T * K, ...]` -> `[T, ...]`: the sum of what became of each token."""
        tokens: Any = _Collect.apply(spread, self._rows, self._places)
        return tokens


class _Spread(torch.autograd.Function):
    """Of tokens, rows `[T * K]`, and places `[T, K]` of each token among them.

    Backward this and `_Collect` are each other; torch would add up with atomics, in any order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum_places(grad, *ctx.saved_tensors), None, None


class _Collect(torch.autograd.Function):
    """As `_Spread`, the other way."""

    @staticmethod
    def forward(ctx: Any, spread: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _sum_places(spread, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.index_select(0, *ctx.saved_tensors), None, None


def _sum_places(spread: Tensor, places: Tensor) -> Tensor:
    return spread.index_select(0, places.flatten()).unflatten(0, places.shape).sum(1)


class ExpertLayer(MoELayer):
    """Megatron's layer of experts with this dispatcher."""

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        mine = self.num_local_experts, self.local_expert_indices
        self.token_dispatcher = Dispatcher(*mine, config=config, pg_collection=pg_collection)
