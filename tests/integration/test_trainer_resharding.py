"""Checkpoints over several processes on gloo: resumed in any layout, training goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import save_model
from tests.trainer_ranks import run_ranks

pytestmark = pytest.mark.stack

TENSOR, PIPELINE, EXPERT = {"tensor": 2}, {"pipeline": 2, "last_stage_layers": 1}, {"expert": 2}
SAVED = {
    "qwen3": {"data": {}, "tensor": TENSOR, "pipeline": PIPELINE},
    "qwen3_moe": {"expert": EXPERT, "data": {}},
    "deepseek_v3": {"expert": EXPERT, "pipeline": PIPELINE, "tensor": {"tensor": 2, "expert_tensor": 2}},
}
"""By family and name, what two ranks save."""
RESHARDED = {
    "qwen3": {"data": TENSOR, "tensor": PIPELINE, "one": TENSOR},
    "qwen3_moe": {"expert": {**TENSOR, **EXPERT}, "data": EXPERT, "one": EXPERT},
    "deepseek_v3": {"expert": PIPELINE, "tensor": {**TENSOR, **EXPERT}, "one": EXPERT},
}
"""What two ranks load then, in another layout than it was saved in; `one` is what one rank saved."""


def test_training_goes_on_in_any_layout(tmp_path: Path) -> None:
    def case(family: str, loaded: str, saved: str, sizes: dict[str, int]) -> tuple:
        return str(tmp_path / family), str(tmp_path / "saved" / family), loaded, saved, sizes

    for family in SAVED:
        save_model(tmp_path / family, family, seed=3)
        (tmp_path / "saved" / family).mkdir(parents=True)
    run_ranks("trainer_checkpoints", 1, [case(family, "", "one", {}) for family in SAVED], tmp_path)
    saves = [case(family, "", name, sizes) for family, several in SAVED.items() for name, sizes in several.items()]
    again = [case(family, name, "", sizes) for family, several in SAVED.items() for name, sizes in several.items()]
    others = [case(family, name, "", sizes) for family, several in RESHARDED.items() for name, sizes in several.items()]
    run_ranks("trainer_checkpoints", 2, [*saves, *again, *others], tmp_path)
    run_ranks(
        "trainer_checkpoints",
        1,
        [case(family, name, "", {}) for family, several in SAVED.items() for name in several],
        tmp_path,
    )
    both = {**TENSOR, **PIPELINE}
    four = [
        case("qwen3", "tensor", "", both),
        case("deepseek_v3", "expert", "", {**both, **EXPERT, "first_stage_layers": 1, "last_stage_layers": 0}),
        case("qwen3_moe", "expert", "", {"expert": 4}),
    ]
    run_ranks("trainer_checkpoints", 4, four, tmp_path)
