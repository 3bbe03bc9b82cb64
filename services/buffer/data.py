"""The prompt data set: rows rendered and tokenised once, in an order that the issue number fixes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.order import place_at
from services.common.prompts import read_rows
from services.common.spec import DataSpec, SpecError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row."""

    row: int
    """Line (JSONL) or row (Parquet) in the file, from 1."""
    token_ids: list[int]
    """Rendered prompt."""
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)
    """For the grader."""


@dataclass(frozen=True, slots=True)
class PromptData:
    """The prompts of one file, without those that are too long."""

    prompts: list[Prompt]
    overlong: int
    """Rows dropped because the prompt is too long."""
    shuffle: bool
    seed: int

    def digest(self) -> str:
        """SHA-256 of all prompts, labels and metadata, in hexadecimal."""
        rows = [(p.token_ids, p.label, *([p.metadata] if p.metadata else [])) for p in self.prompts]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()

    def at(self, issue: int) -> Prompt:
        """The prompt of the group with this issue number."""
        return self.prompts[place_at(issue, len(self.prompts), self.seed if self.shuffle else None)]


def load_prompts(path: Path, spec: DataSpec, tokenizer: Any, max_prompts: int = 0) -> PromptData:
    """Read, check, render and tokenise a data file.

    Args:
        path: JSONL, or Parquet if it ends in .parquet.
        spec: Keys, template and order.
        tokenizer: With a chat template if the rows are messages.
        max_prompts: Only the first so many rows; 0 takes all.

    Raises:
        SpecError: A row is malformed (names file and row), or no prompt is left.
    """
    prompts, overlong = [], 0
    for row in read_rows(path, spec):
        if max_prompts and len(prompts) + overlong >= max_prompts:
            break
        token_ids = _tokenise(row.prompt, spec, tokenizer)
        if len(token_ids) > spec.max_prompt_tokens:
            overlong += 1
        else:
            prompts.append(Prompt(row.number, token_ids, row.label, row.metadata))
    if not prompts:
        raise SpecError(
            f"{path}: no prompt is left ({overlong} are longer than data.max_prompt_tokens = "
            f"{spec.max_prompt_tokens}); give a file with usable rows"
        )
    return PromptData(prompts, overlong, spec.shuffle, spec.seed)


def _tokenise(prompt: str | list[dict[str, str]], spec: DataSpec, tokenizer: Any) -> list[int]:
    if not spec.apply_chat_template:
        return tokenizer.encode(prompt, add_special_tokens=False)
    if not tokenizer.chat_template:
        raise SpecError("data.apply_chat_template: the tokenizer has no chat template; set it to false, and use text")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
