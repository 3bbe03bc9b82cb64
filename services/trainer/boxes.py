"""What a rank holds of a model and its optimizer, as boxes of whole tensors, which a checkpoint gives to any layout.

Megatron's own sharded state names and places a weight. The distributed optimizer gives a rank a range of a weight's
elements: at most three boxes, the end of a row, whole rows, the beginning of a row. So a rank writes what it has and
reads what it needs, in place, and nothing is gathered. No name depends on how parameters are grouped into optimizers,
since that depends on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from services.trainer.megatron import (
    MegatronModule,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
    nested_values,
    parallel_state,
)
from services.trainer.optimizer import Optimizer

OPTIMIZER_PREFIX = "optimizer."


def weight_boxes(chunks: Sequence[MegatronModule]) -> list[ShardedTensor]:
    """All weights of this rank, and the routers' biases, whoever else has them too; the data are views."""
    return [
        box
        for weight, cuts in cuts_of(chunks).items()
        for box in boxes_of(cuts, weight, 0, {"": weight.detach().view(-1)})
    ]


def optimizer_boxes(chunks: Sequence[MegatronModule], optimizer: Optimizer) -> list[ShardedTensor]:
    """Float32 weights and moments of what this rank updates; the data are views."""
    cuts = cuts_of(chunks)
    found = []
    for weight, begin, state in optimizer.shards():
        named = {f"{OPTIMIZER_PREFIX}{name}.": tensor for name, tensor in state.items()}
        found += boxes_of(map(_of_data_parallel, cuts[weight]), weight, begin, named)
    return found


def owned_boxes(chunks: Sequence[MegatronModule], optimizer: Optimizer) -> list[ShardedTensor]:
    """What this rank writes of a model in training: every element of weights and optimizer is owned by one rank."""
    cuts = cuts_of(chunks)
    found = optimizer_boxes(chunks, optimizer)
    for weight, begin, state in optimizer.shards():
        size = next(iter(state.values())).numel()
        mine = {"": weight.detach().view(-1)[begin : begin + size]}
        found += boxes_of(map(_of_data_parallel, cuts[weight]), weight, begin, mine)
    biases = [cut for weight, several in cuts.items() if not isinstance(weight, torch.nn.Parameter) for cut in several]
    return only_owned([*found, *biases])


def only_owned(boxes: list[ShardedTensor]) -> list[ShardedTensor]:
    """Those that no rank before this one has."""
    return [box for box in boxes if is_main_replica(box.replica_id)]


def cuts_of(chunks: Sequence[MegatronModule]) -> dict[Tensor, list[ShardedTensor]]:
    """Where each weight lies in the whole model: gate and up of a feed-forward apart, everything else in one piece."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "non_homogeneous_layers": True}
    cuts = {}
    for one in nested_values([chunk.sharded_state_dict(metadata=metadata) for chunk in chunks]):
        if isinstance(one, ShardedTensorFactory):
            cuts[one.data] = one.build()
        elif isinstance(one, ShardedTensor):
            cuts[one.data] = [one]
    return cuts


def boxes_of(
    cuts: Iterable[ShardedTensor], weight: Tensor, begin: int, named: Mapping[str, Tensor]
) -> Iterator[ShardedTensor]:
    """Boxes of tensors that are the elements `begin` and on of a weight, flat.

    Args:
        cuts: Of the weight.
        weight: As the cuts were made from it.
        begin: Element of the weight.
        named: `[n]` tensors by what comes before the weight's name.
    """
    for cut in cuts:
        assert cut.data is not None
        first = int(cut.data.storage_offset() - weight.storage_offset())
        for prefix, flat in named.items():
            low, high = max(begin, first), min(begin + flat.numel(), first + cut.data.numel())
            if low < high:
                yield from _boxes(cut, prefix + cut.key, flat[low - begin : high - begin], low - first)


def _of_data_parallel(cut: ShardedTensor) -> ShardedTensor:
    """As a part of a weight that the data-parallel ranks share; Megatron numbers them last among those that have it."""
    assert isinstance(cut.replica_id, tuple)
    return replace(cut, replica_id=(*cut.replica_id[:-1], 0))


def _boxes(cut: ShardedTensor, key: str, flat: Tensor, begin: int) -> Iterator[ShardedTensor]:
    """Cut the elements `begin` and on of a vector or matrix that lies as `cut` says, `flat`, into boxes."""
    dims = len(cut.local_shape)
    assert dims <= 2, f"{cut.key}: a range of {dims} dimensions makes more than three boxes"
    columns, ahead = prod(cut.local_shape[1:]), (1,) * cut.prepend_axis_num
    while flat.numel():
        row, column = divmod(begin, columns)
        rows = 0 if column else flat.numel() // columns
        size = rows * columns or min(flat.numel(), columns - column)
        shape = (*ahead, *(max(rows, 1), size // max(rows, 1))[:dims])
        inside = (*(0,) * len(ahead), *(row, column)[:dims])
        yield ShardedTensor(
            key=key,
            data=flat[:size].view(shape),
            dtype=flat.dtype,
            local_shape=shape,
            global_shape=cut.global_shape,
            global_offset=tuple(map(sum, zip(cut.global_offset, inside, strict=True))),
            axis_fragmentations=None,
            replica_id=cut.replica_id,
        )
        flat, begin = flat[size:], begin + size
