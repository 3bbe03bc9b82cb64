"""The tokenizer of a checkpoint, and the tokens that end a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.common.spec import SpecError


def load_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer of a checkpoint. Raises SpecError, in one line, if there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise SpecError(f"model.hf_checkpoint: no usable tokenizer in {checkpoint}: {why}") from None
    if not tokenizer.encode("1", add_special_tokens=False):
        raise SpecError(f"model.hf_checkpoint: the tokenizer in {checkpoint} knows no tokens; is tokenizer.json there?")
    return tokenizer


def stop_token_ids(checkpoint: Path, tokenizer: Any) -> list[int]:
    """Tokens that end a response: the tokenizer's, and those that generation_config.json names.

    Raises:
        SpecError: There are none, or that file cannot be read.
    """
    ids = {tokenizer.eos_token_id}
    config = checkpoint / "generation_config.json"
    if config.is_file():
        try:
            named = json.loads(config.read_text()).get("eos_token_id")
            ids |= set(named) if isinstance(named, list) else {named}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise SpecError(f"{config}: eos_token_id cannot be read: {error}") from None
    ids.discard(None)
    if not ids:
        raise SpecError(
            f"model.hf_checkpoint: neither the tokenizer nor generation_config.json in {checkpoint} "
            "names an end-of-sequence token; add eos_token_id"
        )
    return sorted(ids)
