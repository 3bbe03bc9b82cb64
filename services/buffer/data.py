"""The prompt data set: JSONL or Parquet rows, rendered and tokenised once, in an order that the issue number fixes.

Prompt of the k-th issued group: data epoch e = k // n, position i = k % n of the permutation seeded by seed + e.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from services.common.spec import DataSpec, SpecError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row."""

    row: int
    """Line (JSONL) or row (Parquet) in the file, from 1."""
    token_ids: list[int]
    """Rendered prompt."""
    label: str


@dataclass(frozen=True, slots=True)
class PromptData:
    """The prompts of one file, without those that are too long."""

    prompts: list[Prompt]
    overlong: int
    """Rows dropped because the prompt is too long."""
    shuffle: bool
    seed: int

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
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise SpecError(f"model.hf_checkpoint: no usable tokenizer in {checkpoint}: {error}") from None


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
    for number, row in _rows(path):
        if max_prompts and len(prompts) + overlong >= max_prompts:
            break
        where = f"{path}:{number}"
        token_ids = _tokenise(_field(row, spec.input_key, where), spec, tokenizer, where)
        label = _label(_field(row, spec.label_key, where), spec.label_key, where)
        if len(token_ids) > spec.max_prompt_tokens:
            overlong += 1
        else:
            prompts.append(Prompt(number, token_ids, label))
    if not prompts:
        raise SpecError(
            f"{path}: no prompt is left ({overlong} are longer than data.max_prompt_tokens = "
            f"{spec.max_prompt_tokens}); give a file with usable rows"
        )
    return PromptData(prompts, overlong, spec.shuffle, spec.seed)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise SpecError(f"{path}:{number}: not valid JSON: {error.msg}") from None
            if not isinstance(row, dict):
                raise SpecError(f"{path}:{number}: a row must be a JSON object, this is a {type(row).__name__}")
            yield number, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    from pyarrow import ArrowInvalid, parquet

    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except ArrowInvalid as error:
        raise SpecError(f"{path}: not a Parquet file: {error}") from None


def _field(row: dict[str, Any], key: str, where: str) -> Any:
    if row.get(key) is None:
        raise SpecError(f"{where}: no field {key!r}; the row has {sorted(row)}")
    return row[key]


def _label(value: Any, key: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SpecError(f"{where}: field {key!r} must be text or a number, this is a {type(value).__name__}")
    return str(value)


def _tokenise(value: Any, spec: DataSpec, tokenizer: Any, where: str) -> list[int]:
    if isinstance(value, str) and not spec.apply_chat_template:
        return tokenizer.encode(value, add_special_tokens=False)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not _are_messages(messages):
        raise SpecError(f"{where}: field {spec.input_key!r} must be text or a list of {{role, content}} messages")
    if not spec.apply_chat_template:
        raise SpecError(f"{where}: field {spec.input_key!r} holds messages; they need data.apply_chat_template = true")
    if not tokenizer.chat_template:
        raise SpecError(
            "data.apply_chat_template: the tokenizer has no chat template; set it to false, with text prompts"
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )
