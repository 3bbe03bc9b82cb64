"""What the ranks of a fleet tell each other beside Megatron: through host memory, over gloo."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.megatron import parallel_state

FLEET_ID_BYTES = 16


class Ranks:
    """All ranks, and those of them that train on the same rows. All must make it together, after Megatron's groups."""

    def __init__(self) -> None:
        everyone: Any = dist.new_group(backend="gloo")
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(FLEET_ID_BYTES)), dtype=torch.uint8)
        dist.broadcast(drawn, group_src=0, group=everyone)
        self.fleet_id = bytes(drawn.tolist()).hex()
        """Drawn anew whenever the ranks meet."""
        self.replica = parallel_state.get_data_parallel_rank()
        """Which copy of the model this rank has a part of."""
        mine = torch.tensor([self.replica])
        replicas = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(replicas, mine, group=everyone)
        members: dict[int, list[int]] = {}
        for rank, replica in enumerate(map(int, replicas)):
            members.setdefault(replica, []).append(rank)
        groups = {replica: dist.new_group(ranks, backend="gloo") for replica, ranks in sorted(members.items())}
        self._group: Any = groups[self.replica]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one of its copy of the model that fetches the samples for all."""
        return self._group.rank() == 0

    def share(self, payloads: Sequence[bytes]) -> list[bytes]:
        """What the first rank of this copy of the model gives, on every one; all of them must call it."""
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
