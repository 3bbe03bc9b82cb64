"""Checks of a user's model and prompts, before anything starts: one sentence names the file, the line and the cure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROW_SHAPE = 'each line is an object like {"prompt": [{"role": "user", "content": "..."}], "label": "..."}'


class BadInput(ValueError):
    """Something that the user gave cannot be used."""


def check_model(path: Path) -> int:
    """Check a Hugging Face checkpoint directory; returns its longest context in tokens.

    Raises:
        BadInput: A part of it is missing.
    """
    if not path.is_dir():
        raise BadInput(f"--model {path}: there is no such directory; give a Hugging Face checkpoint directory")
    for pattern in ("config.json", "*.safetensors", "tokenizer_config.json"):
        if not any(path.glob(pattern)):
            raise BadInput(
                f"--model {path}: there is no {pattern} in it; give a whole Hugging Face checkpoint directory"
            )
    try:
        return int(json.loads((path / "config.json").read_text())["max_position_embeddings"])
    except (KeyError, TypeError, ValueError):
        raise BadInput(f"{path / 'config.json'}: no max_position_embeddings; the model's context is unknown") from None


def check_prompts(option: str, path: Path) -> int:
    """Check every row of a JSON-lines prompt file; returns how many there are.

    Raises:
        BadInput: The file is missing, empty, or a row is malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise BadInput(f"{option} {path}: cannot be read ({reason}); give a JSON-lines file") from None
    rows = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            if problem := row_problem(line):
                raise BadInput(f"{path}:{number}: {problem}; {ROW_SHAPE}")
            rows += 1
    if not rows:
        raise BadInput(f"{option} {path}: there are no rows in it; {ROW_SHAPE}")
    return rows


def row_problem(line: str) -> str:
    """What is wrong with a line of a prompt file, or ''."""
    try:
        row = json.loads(line)
    except ValueError:
        return "not JSON"
    if not isinstance(row, dict):
        return "not a JSON object"
    if not _is_prompt(row.get("prompt")):
        return "`prompt` is neither a text nor a list of messages with `role` and `content`"
    label = row.get("label")
    if isinstance(label, bool) or not isinstance(label, str | int | float) or label == "":
        return "`label` is neither a text nor a number"
    return ""


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(
            isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
            for one in prompt
        )
    return isinstance(prompt, str) and bool(prompt)
