"""The prompt data set: rows rendered and tokenised once, in an order that the issue number fixes.

Prompt of the k-th issued group: data epoch e = k // n, position i = k % n of the permutation seeded by seed + e.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

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
        epoch, position = divmod(issue, len(self.prompts))
        return self.prompts[_order(len(self.prompts), self.seed + epoch)[position] if self.shuffle else position]


@lru_cache(maxsize=4)
def _order(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def load_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer of a checkpoint. Raises SpecError if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(f"model.hf_checkpoint: no usable tokenizer in {checkpoint}: {error}") from None
    if not tokenizer.encode("1", add_special_tokens=False):
        raise SpecError(f"model.hf_checkpoint: the tokenizer in {checkpoint} knows no tokens; is tokenizer.json there?")
    return tokenizer


def stop_token_ids(checkpoint: Path, tokenizer: Any) -> list[int]:
    """Tokens that end a response: the tokenizer's, and those that generation_config.json names."""
    ids = {tokenizer.eos_token_id}
    config = checkpoint / "generation_config.json"
    if config.is_file():
        named = json.loads(config.read_text()).get("eos_token_id")
        ids |= set(named) if isinstance(named, list) else {named}
    ids.discard(None)
    if not ids:
        raise SpecError(
            f"model.hf_checkpoint: neither the tokenizer nor generation_config.json in {checkpoint} "
            "names an end-of-sequence token; add eos_token_id"
        )
    return sorted(ids)


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
