"""Models over several processes on gloo: Hugging Face to Megatron and back bit for bit, the same logits, and the same
losses and gradients as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import save_model
from tests.trainer_layouts import LOGITS, sequence
from tests.trainer_ranks import run_ranks

pytestmark = pytest.mark.stack

DENSE, SPARSE = ("qwen3", "qwen2"), ("qwen3_moe", "deepseek_v3", "glm4_moe")
TWO: dict[str, tuple[dict[str, int], ...]] = {
    **dict.fromkeys(DENSE, ({}, {"tensor": 2}, {"pipeline": 2})),
    **dict.fromkeys(
        SPARSE,
        (
            {},
            {"expert": 2},
            {"expert": 2, "tensor": 2},
            {"tensor": 2, "expert_tensor": 2},
            {"pipeline": 2, "last_stage_layers": 1},
        ),
    ),
}
FOUR: dict[str, tuple[dict[str, int], ...]] = {
    **dict.fromkeys(DENSE, ({"tensor": 2, "pipeline": 2},)),
    **dict.fromkeys(SPARSE, ({"tensor": 2, "pipeline": 2, "expert": 2, "last_stage_layers": 1}, {"expert": 4})),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family, each with the logits of Hugging Face's model, and the steps of one process."""
    paths = {family: tmp_path_factory.mktemp(family) for family in (*DENSE, *SPARSE)}
    for family, path in paths.items():
        hf = save_model(path, family, seed=3, tied=family == "qwen3")
        with torch.no_grad():
            torch.save(hf(sequence()).logits, path / LOGITS)
    run_ranks("trainer_layouts", 1, [(str(path), {}) for path in paths.values()], tmp_path_factory.mktemp("one"))
    return paths


@pytest.mark.parametrize(("world", "layouts"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_weights_and_logits_do_not_depend_on_the_layout(
    checkpoints: dict[str, Path], world: int, layouts: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(
        "trainer_layouts",
        world,
        [(str(checkpoints[family]), sizes) for family, several in layouts.items() for sizes in several],
        tmp_path,
    )
