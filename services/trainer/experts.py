"""All experts of a rank as one grouped matrix product.

Megatron's own experts without Transformer Engine run one after another, each a handful of small kernels. Here a product
over all of them is one kernel in bfloat16 on a GPU, which reads on the device how many rows each expert has; on the CPU
and in float32 torch goes from expert to expert.

A matrix of all experts is one parameter `[E, out, in]`. Were there one for each expert, their storage would have to be
a stack: Megatron lays parameters out in buffers of its own, in their order and padded, and begins a new bucket between
any two; and the gradient of the stack would have to be taken apart again, with a kernel for each expert. Everything
that goes by weights sees each expert's matrix as a weight of its own: services.trainer.layout.weights_of gives views by
name, and the checkpoint's boxes are those of single matrices.

Shapes: E experts of this rank, R rows that they get, H hidden size, F columns of an expert on this rank.
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
