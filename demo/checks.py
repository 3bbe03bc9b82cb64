"""The check of a user's model before anything starts: one sentence names the file and the cure."""

from __future__ import annotations

import json
from pathlib import Path

from services.common.spec import SpecError


def check_model(path: Path) -> int:
    """Check a Hugging Face checkpoint directory; returns its longest context in tokens.

    Raises:
        SpecError: A part of it is missing.
    """
    if not path.is_dir():
        raise SpecError(f"--model {path}: there is no such directory; give a Hugging Face checkpoint directory")
    for pattern in ("config.json", "*.safetensors", "tokenizer_config.json"):
        if not any(path.glob(pattern)):
            raise SpecError(
                f"--model {path}: there is no {pattern} in it; give a whole Hugging Face checkpoint directory"
            )
    try:
        return int(json.loads((path / "config.json").read_text())["max_position_embeddings"])
    except (KeyError, TypeError, ValueError):
        raise SpecError(f"{path / 'config.json'}: no max_position_embeddings; the model's context is unknown") from None
