"""Element-wise chains as single kernels on CUDA, through torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from services.trainer.megatron import ON_CUDA

P = ParamSpec("P")
R = TypeVar("R")


def fused(rows: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile a function on CUDA; elsewhere it stays as it is.

    Args:
        rows: So many leading arguments are tensors whose first dimension differs from call to call. A few compiled
            forms serve them all: 1 is one, and reductions over many rows have another. Every other size and number is a
            constant of the form.
    """
    return functools.partial(_compile, rows=rows) if ON_CUDA else lambda function: function


def _compile(function: Callable[P, R], rows: int) -> Callable[P, R]:
    import torch
    from torch._dynamo import maybe_mark_dynamic

    compiled = torch.compile(function, dynamic=False)  # a second model in the process gets a form of its own

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for tensor in args[:rows]:
            maybe_mark_dynamic(tensor, 0)
        return compiled(*args, **kwargs)

    return call
