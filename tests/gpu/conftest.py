"""Fixtures of the tests on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """Megatron, as the one rank of a trainer has it."""
    import torch._dynamo

    from services.trainer import megatron

    torch._dynamo.config.recompile_limit = 64  # more dtypes and sizes meet here than in a trainer
    megatron.initialize(seed=1)
    yield
    megatron.destroy()
