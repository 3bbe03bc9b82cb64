"""The ranks that have a part of the same copy of the model, and train on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.megatron import MARGIN_S, parallel_state
from services.trainer.ranks import all_ranks


class Replica:
    """This rank's copy of the model. All ranks must make theirs together, after Megatron's groups."""

    def __init__(self, hang_timeout_s: float) -> None:
        """See TrainerSpec."""
        self.number = parallel_state.get_data_parallel_rank()
        """Of the copy; also the data-parallel rank."""
        members: dict[int, list[int]] = {}
        for rank, number in enumerate(all_ranks(self.number)):
            members.setdefault(number, []).append(rank)
        timeout = timedelta(seconds=hang_timeout_s + MARGIN_S)
        groups = {
            number: dist.new_group(ranks, backend="gloo", timeout=timeout) for number, ranks in sorted(members.items())
        }
        self._group: Any = groups[self.number]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that fetches the samples for all."""
        return self._group.rank() == 0

    def share(self, payloads: Sequence[bytes]) -> list[bytes]:
        """What the first rank gives, on every one; all of them must call it. Through host memory, over gloo."""
        sizes = self._from_first(torch.tensor([len(one) for one in payloads], dtype=torch.int64))
        flat = self._from_first(torch.from_numpy(np.frombuffer(b"".join(payloads), np.uint8).copy()))
        ends = sizes.cumsum(0).tolist()
        content = flat.numpy().tobytes()
        return [content[end - size : end] for size, end in zip(sizes.tolist(), ends, strict=True)]

    def _from_first(self, tensor: Tensor) -> Tensor:
        """`tensor` of the first rank; that of the others only says its dtype."""
        length = torch.tensor([tensor.numel()])
        dist.broadcast(length, group_src=0, group=self._group)
        found = tensor if self.is_first else tensor.new_empty(int(length))
        if found.numel():
            dist.broadcast(found, group_src=0, group=self._group)
        return found
