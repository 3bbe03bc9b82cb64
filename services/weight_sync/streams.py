"""Where the CUDA work of weight transfers runs: one stream for each device, beside generation and training.

It is the same stream every time, because the allocator of torch keeps freed memory for the stream that it served: with
a new stream for each session nothing would be reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def with_index(device: torch.device) -> torch.device:
    """The device with its number: `cuda` alone is the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Puts the CUDA work of this thread on the stream for transfers, and waits for it at the end."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(_stream(device.index)):
        try:
            yield
        finally:
            torch.cuda.current_stream().synchronize()


@cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)
