"""Where a run has its checkpoints; and what a directory is that was named in place of one, in words."""

from __future__ import annotations

import re
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""In the directory of a run."""
STATE_FILE = "state.json"
"""In a checkpoint, and in what `flotilla convert hf-to-torch-dist` writes; the last file that is."""
_NAME = re.compile(r"step-(\d{8})")


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or would be."""
    return root / f"step-{step:08d}"


def checkpoint_steps(root: Path) -> list[int]:
    """Steps of all complete checkpoints under a directory, oldest first."""
    names = [_NAME.fullmatch(path.name) for path in root.iterdir()] if root.is_dir() else []
    return sorted(int(name[1]) for name in names if name)


def why_no_checkpoint(path: Path) -> str:
    """One sentence on a path that should be a torch_dist directory and has no STATE_FILE: what it is instead."""
    if (path / CHECKPOINTS).is_dir():
        return f"{path} is the directory of a run; name one of its checkpoints: {_list(path / CHECKPOINTS)}"
    if path.parent.name == CHECKPOINTS and path.parent.is_dir():
        return f"{path} is no checkpoint; the run has {_list(path.parent)}"
    if not path.is_dir():
        return f"there is no directory {path}"
    if (path / "config.json").is_file():
        return f"{path} is a Hugging Face checkpoint; `flotilla convert hf-to-torch-dist` makes a torch_dist one of it"
    return f"{path} has no {STATE_FILE}: it is neither a checkpoint of a run nor of `flotilla convert hf-to-torch-dist`"


def _list(root: Path) -> str:
    return ", ".join(checkpoint_path(root, step).name for step in checkpoint_steps(root)) or "none yet"
