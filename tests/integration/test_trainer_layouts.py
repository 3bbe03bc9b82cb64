"""Models over several processes on gloo: Hugging Face to Megatron and back bit for bit, the same logits, and the same
losses and gradients as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import save_model, save_mtp_model
from tests.trainer_layouts import LOGITS, sequence
from tests.trainer_ranks import DEADLINE_S, run_ranks

pytestmark = [pytest.mark.stack, pytest.mark.timeout(3 * DEADLINE_S)]

Case = tuple[str, dict[str, Any]]
"""Name of a checkpoint, and the layout."""
DENSE, SPARSE = ("qwen3", "qwen2"), ("qwen3_moe", "deepseek_v3", "glm4_moe")
MTP = ("deepseek_v3", "glm4_moe_mtp")
"""These have a layer for multi-token prediction, which is trained too."""
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
INTERLEAVED = {"pipeline": 2, "virtual_stages": 2}
MORE_ON_TWO: tuple[Case, ...] = (
    *((family, {"context": 2}) for family in ("qwen3", *SPARSE)),
    ("deepseek_v3", {"context": 2, "recompute": "selective", "overlap": True}),
    ("glm4_moe_mtp", {"context": 2}),
    ("glm4_moe_mtp", {"pipeline": 2, "last_stage_layers": 1, "recompute": "full", "overlap": True}),
    ("qwen3_deep", INTERLEAVED),
    ("qwen3", {"overlap": True}),
    ("qwen3", {"tensor": 2, "recompute": "full"}),
)
MORE_ON_FOUR: tuple[Case, ...] = (
    ("qwen3", {"tensor": 2, "context": 2}),
    ("qwen2", {"pipeline": 2, "context": 2}),
    ("deepseek_v3", {"tensor": 2, "context": 2, "expert": 4}),
    ("glm4_moe", {"pipeline": 2, "context": 2, "expert": 2, "last_stage_layers": 1, "overlap": True}),
    ("qwen3_deep", {**INTERLEAVED, "overlap": True}),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family, each with the logits of Hugging Face's model, and the steps of one process."""
    paths = {name: tmp_path_factory.mktemp(name) for name in (*DENSE, *SPARSE, "qwen3_deep", "glm4_moe_mtp")}
    for name, path in paths.items():
        family = name.removesuffix("_deep").removesuffix("_mtp")
        more = {"num_hidden_layers": 4} if name.endswith("_deep") else {}
        if name in MTP:
            hf = save_mtp_model(path, family, seed=3)
        else:
            hf = save_model(path, family, seed=3, tied=family == "qwen3", **more)
        with torch.no_grad():
            torch.save(hf(sequence()).logits, path / LOGITS)
    run_ranks("trainer_layouts", 1, [(str(path), {}) for path in paths.values()], tmp_path_factory.mktemp("one"))
    return paths


@pytest.mark.parametrize(
    ("world", "layouts", "more"), [(2, TWO, MORE_ON_TWO), (4, FOUR, MORE_ON_FOUR)], ids=["2 ranks", "4 ranks"]
)
def test_weights_and_logits_do_not_depend_on_the_layout(
    checkpoints: dict[str, Path], world: int, layouts: dict[str, Any], more: tuple[Case, ...], tmp_path: Path
) -> None:
    cases = [*((family, layout) for family, several in layouts.items() for layout in several), *more]
    run_ranks("trainer_layouts", world, [(str(checkpoints[name]), layout) for name, layout in cases], tmp_path)
