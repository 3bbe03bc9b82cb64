"""A layer of experts: all experts of a rank as one grouped matrix product, and no wait for the device on the way.

Megatron's own experts without Transformer Engine run one after another, each a handful of small kernels, and its
dispatcher waits for the number of tokens of each. Here a product over all experts is one kernel, which reads those
numbers on the device. On Hopper and in bfloat16 that is; elsewhere torch goes from expert to expert in C++.

A matrix of all experts is one parameter `[E, out, in]`. Were there one for each expert, their storage would have to be
a stack: Megatron lays parameters out in buffers of its own, in their order and padded, and begins a new bucket between
any two; and the gradient of the stack would have to be taken apart again, with a kernel for each expert. Everything
that goes by weights sees each expert's matrix as a weight of its own: services.trainer.layout.weights_of gives views by
name, and the checkpoint's boxes are those of single matrices.

Shapes: T tokens, K experts for each of them, E experts of this rank, R rows that these get, H hidden size, F columns of
an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.trainer.fusion import fused
from services.trainer.megatron import (
    DEVICE,
    MegatronModule,
    MoEAlltoAllTokenDispatcher,
    MoELayer,
    ShardedTensor,
    ShardedTensorFactory,
    TransformerConfig,
)


class GroupedExperts(MegatronModule):
    """Gated feed-forwards of this rank's experts, in Megatron's order of gate over up; weights are not initialised."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, pg_collection: Any, name: str | None = None
    ) -> None:
        super().__init__(config)
        del name
        assert config.moe_ffn_hidden_size is not None
        self._expert_group, self._tensor_group = pg_collection.ep, pg_collection.expt_tp
        self._copy = pg_collection.expt_dp.rank()
        columns = config.moe_ffn_hidden_size // self._tensor_group.size()
        self.linear_fc1 = self._stack(num_local_experts, 2 * columns, config.hidden_size, cut=1)
        self.linear_fc2 = self._stack(num_local_experts, config.hidden_size, columns, cut=2)

    def _stack(self, *shape: int, cut: int) -> torch.nn.Parameter:
        """A parameter with the marks that Megatron gives the weight of an expert's linear layer, cut along `cut`."""
        weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype, device=DEVICE))
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, cut, 1
        sizes = self.config.tensor_model_parallel_size, self.config.expert_tensor_parallel_size
        weight.allreduce = self._expert_group.size() == 1 and sizes[0] == sizes[1]
        return weight

    def forward(self, rows: Tensor, counts: Tensor, scores: Tensor) -> tuple[Tensor, None]:
        """Megatron's interface of experts.

        Args:
            rows: `[R, H]`, those of the first expert first.
            counts: `[E]`, rows of each expert, on the device.
            scores: `[R]`, by which the output of a row is multiplied.

        Returns:
            `[R, H]`, with tensor parallelism of experts this rank's part of a sum; and no bias.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = weighted_swiglu(grouped_linear(rows, self.linear_fc1, ends), scores)
        return grouped_linear(inner, self.linear_fc2, ends), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Where each expert's matrices lie in the model: under the names of Megatron's own experts."""
        del metadata
        assert not sharded_offsets, "layers are numbered in names"
        names = ("linear_fc1", 0, 2), ("linear_fc2", 1, 1)
        return {prefix + name: self._factory(f"{prefix}experts.{name}.weight", name, *cut) for name, *cut in names}

    def _factory(self, key: str, name: str, dim: int, parts: int) -> ShardedTensorFactory:
        def build(key: str, stack: Tensor, _replica: Any, _range: Any) -> Any:
            return list(self._boxes(key, stack, dim, parts))

        merge: Any = torch.stack  # unused: a box is read in place
        return ShardedTensorFactory(key, getattr(self, name), build, merge)

    def _boxes(self, key: str, stack: Tensor, dim: int, parts: int) -> Iterator[ShardedTensor]:
        """Of each expert's matrix, which ranks share along `dim`, each of its `parts` for itself."""
        ahead, all_experts = self._expert_group.rank() * len(stack), self._expert_group.size() * len(stack)
        rank, size = self._tensor_group.rank(), self._tensor_group.size()
        for expert, matrix in enumerate(stack.detach()):
            for index, part in enumerate(matrix.chunk(parts)):
                place = (0, ahead + expert, all_experts), (1 + dim, index * size + rank, parts * size)
                yield ShardedTensor.from_rank_offsets(
                    key, part, *place, replica_id=(0, 0, self._copy), prepend_axis_num=1
                )


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows times its matrix: `[R, in]`, `[E, out, in]` -> `[R, out]`.

    Args:
        rows: Those of the first expert first.
        weights: `in` and `out` make rows of a multiple of 16 bytes, which the kernel wants.
        ends: `[E]` int32, the row behind the last of each expert; the last of them is R.
    """
    if not len(rows):  # there is no kernel for nothing, but weights get a gradient of zeros
        return rows @ weights[0].T
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


@fused(rows=2)
def weighted_swiglu(mixed: Tensor, scores: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202) of gates and ups side by side, `[R, 2F]`, times the score `[R]` of each row."""
    gate, up = mixed.chunk(2, -1)
    return (F.silu(gate) * up * scores[:, None]).to(mixed.dtype)


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher, whose counts stay on the device, and which adds up what experts make in a fixed order.

    Only expert-parallel ranks, which send each other rows, wait for the number of these, once a layer.
    """

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Any:
        if not self._alone:
            super()._maybe_dtoh_and_synchronize(point)
        return tokens_per_expert

    @property
    def _alone(self) -> bool:
        """Whether this rank has all of every expert."""
        return self.ep_size == self.tp_size == 1

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
        tokens, rows = len(routing_map), int(self.num_out_tokens)
        chosen = routing_map.T.flatten().argsort(descending=True, stable=True)[:rows]
        self._rows = chosen % tokens
        self._places = self._rows.argsort(stable=True).view(tokens, -1)
        spread: Any = _Spread.apply(hidden_states.flatten(0, -2), self._rows, self._places)
        return spread, probs.T.flatten().gather(0, chosen)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Any, ...]:
        """What experts get: rows by expert, how many of each, and scores."""
        if not self._alone:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        return global_input_tokens, self.tokens_per_expert, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """What goes back to the ranks that the rows came from."""
        return hidden_states if self._alone else super().combine_preprocess(hidden_states)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Add up what a token's experts made of it: `[T * K, H]` by expert, to the shape of the hidden states."""
        made: Any = _Collect.apply(permutated_local_input_tokens, self._rows, self._places)
        return made.view(self.hidden_shape)


class _Spread(torch.autograd.Function):
    """Each token K times, by expert: `[T, H]`, rows `[T * K]`, places `[T, K]` of these by token -> `[T * K, H]`.

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
    """The sum of what became of each token: `[T * K, H]` -> `[T, H]`, the rest as in `_Spread`."""

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
