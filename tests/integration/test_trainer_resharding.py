"""Checkpoints over several processes on gloo: resumed in any layout, training goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import save_model, save_mtp_model
from tests.trainer_ranks import DEADLINE_S, run_ranks

pytestmark = [pytest.mark.stack, pytest.mark.timeout(3 * DEADLINE_S)]

TENSOR, PIPELINE, EXPERT = {"tensor": 2}, {"pipeline": 2, "last_stage_layers": 1}, {"expert": 2}
INTERLEAVED = {"pipeline": 2, "virtual_stages": 2}
SAVED = {
    "qwen3": {"data": {}, "tensor": TENSOR, "pipeline": PIPELINE, "context": {"context": 2, "overlap": True}},
    "qwen3_moe": {"expert": EXPERT},
    "deepseek_v3": {"expert": EXPERT, "pipeline": PIPELINE},
    "qwen3_deep": {"interleaved": INTERLEAVED},
}
"""By family and name, what two ranks save."""
RESHARDED = {
    "qwen3": {"data": TENSOR, "one": TENSOR},
    "qwen3_moe": {"expert": {**TENSOR, **EXPERT}, "one": EXPERT},
    "deepseek_v3": {"expert": PIPELINE, "one": EXPERT},
    "qwen3_deep": {"one": INTERLEAVED},
}
"""What two ranks load then, in another layout than it was saved in; `one` is what one rank saved."""
ALL = {**TENSOR, **PIPELINE}
FOUR = {
    "qwen3": {"tensor": ALL},
    "qwen3_moe": {"expert": {"expert": 4}},
    "deepseek_v3": {"expert": {**ALL, **EXPERT, "first_stage_layers": 1, "last_stage_layers": 0}},
}
"""What four ranks load."""


Cases = dict[str, dict[str, dict[str, Any]]]


def cases(folder: Path, layouts: Cases, *, save: bool = False) -> list[tuple[Any, ...]]:
    """As tests.trainer_checkpoints takes them."""
    return [
        (str(folder / family), str(folder / "saved" / family), "" if save else name, name if save else "", sizes)
        for family, several in layouts.items()
        for name, sizes in several.items()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what one rank and what two have saved; two have also loaded it again, and what one saved."""
    path = tmp_path_factory.mktemp("resharding")
    for family in SAVED:
        more: dict[str, Any] = {"num_hidden_layers": 4} if family.endswith("_deep") else {}
        if family == "deepseek_v3":  # with a layer for multi-token prediction, which is trained too
            save_mtp_model(path / family, family, seed=3)
        else:
            save_model(path / family, family.removesuffix("_deep"), seed=3, **more)
        (path / "saved" / family).mkdir(parents=True)
    run_ranks("trainer_checkpoints", 1, cases(path, {family: {"one": {}} for family in SAVED}, save=True), path)
    both = [*cases(path, SAVED, save=True), *cases(path, SAVED), *cases(path, RESHARDED)]
    run_ranks("trainer_checkpoints", 2, both, path)
    return path


def test_one_rank_goes_on_with_what_two_saved(folder: Path) -> None:
    layouts: Cases = {family: {name: {} for name in several} for family, several in SAVED.items()}
    run_ranks("trainer_checkpoints", 1, cases(folder, layouts), folder)


@pytest.mark.nightly
def test_four_ranks_go_on_with_what_two_saved(folder: Path) -> None:
    run_ranks("trainer_checkpoints", 4, cases(folder, FOUR), folder)


@pytest.mark.nightly
def test_ranks_wait_for_a_slow_disk(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    run_ranks("trainer_slow_disk", 2, [(str(tmp_path / "model"), str(tmp_path / "checkpoints"), {})], tmp_path)
