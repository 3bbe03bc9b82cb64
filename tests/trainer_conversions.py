"""One rank of several on gloo: a model to torch_dist and back.

A case is a Hugging Face checkpoint, the directory to make of it, and the sizes of the layout (tests.trainer_ranks).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.common.spec import ParallelSpec
from services.trainer import megatron
from services.trainer.megatron import parallel_state
from services.trainer.torch_dist import write_hf, write_torch_dist
from tests.trainer_ranks import run_cases

BACK = ".hf"
"""After the name of a torch_dist directory: what was made of it."""


def check(hf: str, output: str, sizes: dict[str, Any]) -> None:
    """Two conversions by all ranks; the second knows no layout."""
    write_torch_dist(Path(hf), Path(output), ParallelSpec(**sizes))
    parallel_state.destroy_model_parallel()
    megatron.open_groups(1, megatron.ONE_RANK)
    write_hf(Path(output), Path(hf), Path(output + BACK))


if __name__ == "__main__":
    run_cases(check)
