"""Directories of checkpoints, and what is said of those that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.run_checkpoints import checkpoint_steps, why_no_checkpoint
from services.common.spec import SpecError
from services.trainer.checkpoint import CheckpointError, find_checkpoint
from tests.trainer_cases import make_spec


def test_only_complete_checkpoints_are_listed(tmp_path: Path) -> None:
    assert checkpoint_steps(tmp_path / "absent") == []
    for name in ("step-00000010", "step-00000002", ".unfinished-step-00000012", "step-3", "notes"):
        (tmp_path / name).mkdir()
    assert checkpoint_steps(tmp_path) == [2, 10]


def test_what_a_directory_is_instead(tmp_path: Path) -> None:
    run, model, other = tmp_path / "run", tmp_path / "model", tmp_path / "other"
    for folder in (run / "checkpoints" / "step-00000020", model, other):
        folder.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    gone = run / "checkpoints" / "step-00000010"
    for path, words in (
        (run, f"{run} is the directory of a run; name one of its checkpoints: step-00000020"),
        (gone, f"{gone} is no checkpoint; the run has step-00000020"),
        (tmp_path / "absent", f"there is no directory {tmp_path / 'absent'}"),
        (model, f"{model} is a Hugging Face checkpoint; `flotilla convert hf-to-torch-dist`"),
        (other, f"{other} has no state.json"),
    ):
        assert why_no_checkpoint(path).startswith(words)
        with pytest.raises(SpecError, match=r"^model\.load: "):
            make_spec(model, model={"load": path}).check_files()


def test_the_newest_is_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}/checkpoints: there is no complete checkpoint"):
        find_checkpoint(tmp_path)
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert find_checkpoint(tmp_path).name == "step-00000010"
    with pytest.raises(CheckpointError, match="the run has step-00000002, step-00000010"):
        find_checkpoint(tmp_path / "checkpoints" / "step-00000004")
