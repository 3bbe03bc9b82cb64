"""What a rank holds of a model and its optimizer, as boxes of whole tensors, which a checkpoint gives to any layout.

Megatron's own sharded state names and places a weight. The distributed optimizer gives a rank a range of a weight's
elements: at most three boxes, the end of a row, whole rows, the beginning of a row. So a rank writes what it has and
reads what it needs, in place, and nothing is gathered. No name depends on how parameters are grouped into optimizers,
since that depends on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def weight_boxes(module: MegatronModule) -> list[ShardedTensor]:
    """All weights of this rank, and the routers' biases, whoever else has them too; the data are views."""
    cuts = [cut for several in _cuts_of(module).values() for cut in several]
    return [box for cut in cuts for box in _boxes(cut, cut.key, _flat(_data(cut)), 0)]


def optimizer_boxes(module: MegatronModule, optimizer: Optimizer) -> list[ShardedTensor]:
    """Float32 weights and moments of what this rank updates; the data are views."""
    cuts = _cuts_of(module)
    found = []
    for weight, begin, state in optimizer.shards():
        named = {f"{OPTIMIZER_PREFIX}{name}.": tensor for name, tensor in state.items()}
        found += _shard_boxes(cuts[weight], weight, begin, named)
    return found


def owned_boxes(module: MegatronModule, optimizer: Optimizer) -> list[ShardedTensor]:
    """What this rank writes of a model in training: every element of weights and optimizer is owned by one rank."""
    cuts = _cuts_of(module)
    found = optimizer_boxes(module, optimizer)
    for weight, begin, state in optimizer.shards():
        size = next(iter(state.values())).numel()
        found += _shard_boxes(cuts[weight], weight, begin, {"": _flat(weight)[begin : begin + size]})
    biases = [cut for weight, several in cuts.items() if not isinstance(weight, torch.nn.Parameter) for cut in several]
    return only_owned([*found, *biases])


def only_owned(boxes: list[ShardedTensor]) -> list[ShardedTensor]:
    """Those that no rank before this one has."""
    return [box for box in boxes if is_main_replica(box.replica_id)]


def _cuts_of(module: MegatronModule) -> dict[Tensor, list[ShardedTensor]]:
    """Where each weight lies in the whole model: gate and up of a feed-forward apart, everything else in one piece."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    tree = module.sharded_state_dict(metadata={"dp_cp_group": group, "non_homogeneous_layers": True})
    cuts = {}
    for one in nested_values(tree):
        if isinstance(one, ShardedTensorFactory):
            cuts[one.data] = one.build()
        elif isinstance(one, ShardedTensor):
            cuts[one.data] = [one]
    return cuts


def _shard_boxes(
    cuts: list[ShardedTensor], weight: Tensor, begin: int, named: Mapping[str, Tensor]
) -> Iterator[ShardedTensor]:
    """Boxes of elements `begin` and on of a weight, by prefix of their names; other data-parallel ranks have others."""
    for cut in cuts:
        data = _data(cut)
        first = int(data.storage_offset() - weight.storage_offset())
        for prefix, flat in named.items():
            low, high = max(begin, first), min(begin + flat.numel(), first + data.numel())
            if low < high:
                own = replace(cut, replica_id=(*_replica(cut)[:-1], 0))
                yield from _boxes(own, prefix + cut.key, flat[low - begin : high - begin], low - first)


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


def _data(cut: ShardedTensor) -> Tensor:
    assert cut.data is not None
    return cut.data


def _replica(cut: ShardedTensor) -> tuple[int, ...]:
    """The ranks that have the same: by pipeline, tensor and data parallelism."""
    assert isinstance(cut.replica_id, tuple)
    return cut.replica_id


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)
