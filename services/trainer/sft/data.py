"""The data set: rows of a file as samples, and the batches that a run makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from services.common.order import place_at
from services.common.rows import field_of, read_objects
from services.common.spec import SpecError
from services.common.spec.sft import SftDataSpec, SftSpec
from services.common.tokenizers import load_tokenizer, stop_token_ids
from services.trainer.sft.samples import SftSample, make_sample
from services.trainer.sft.turns import ASSISTANT, STEP_LOSS_MASK, Message, tokenise_conversation

TOOLS_KEY = "tools"
MASK_KEY = "loss_mask"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "observation")
"""That templates know; others are for the template to refuse, unless they look like one of these."""


@dataclass(frozen=True, slots=True)
class SftData:
    """The samples of one file."""

    samples: list[SftSample]
    overlong: int
    """Rows left out because they are too long."""

    def batches(self, spec: SftSpec) -> int:
        """Batches of a whole run."""
        return -(-len(self.samples) * spec.sft.epochs // spec.sft.batch_size)

    def batch(self, number: int, spec: SftSpec) -> list[SftSample]:
        """The samples of a batch of a run, from 0."""
        count, size = len(self.samples), spec.sft.batch_size
        seed = spec.data.seed if spec.data.shuffle else None
        uses = range(number * size, min((number + 1) * size, count * spec.sft.epochs))
        return [self.samples[place_at(use, count, seed)] for use in uses]


def load_data(spec: SftDataSpec, checkpoint: Path, vocabulary: int) -> SftData:
    """Read, check, render and tokenise a data file.

    Args:
        spec: Which file, which fields.
        checkpoint: Has the tokenizer.
        vocabulary: Tokens of the model.

    Raises:
        SpecError: A row cannot be used (names file, row and field), or none is left.
    """
    reader = _Reader(spec, checkpoint, vocabulary)
    samples: list[SftSample] = []
    overlong = 0
    for where, sample in reader.read():
        if len(sample.tokens) <= spec.max_tokens:
            samples.append(sample)
        elif spec.overlong == "drop":
            overlong += 1
        else:
            raise SpecError(
                f"{where}: {len(sample.tokens)} tokens are more than data.max_tokens = {spec.max_tokens}; raise it, or "
                'leave such rows out with data.overlong = "drop"'
            )
    if not samples:
        longer = f": all {overlong} are longer than data.max_tokens = {spec.max_tokens}" if overlong else ""
        raise SpecError(f"{spec.path}: there are no samples{longer}")
    return SftData(samples, overlong)


class _Reader:
    def __init__(self, spec: SftDataSpec, checkpoint: Path, vocabulary: int) -> None:
        self._spec, self._vocabulary = spec, vocabulary
        self._tokenizer = load_tokenizer(checkpoint)
        self._stop_ids = stop_token_ids(checkpoint, self._tokenizer)

    def read(self) -> Iterator[tuple[str, SftSample]]:
        """Every sample with its file and row. Raises SpecError that begins with these."""
        for number, row in read_objects(self._spec.path):
            where = f"{self._spec.path}:{number}"
            if row.get(self._spec.messages_key) is not None:
                yield where, self._conversation(row, where)
            elif row.keys() & {self._spec.prompt_key, self._spec.response_key}:
                yield where, self._pair(row, where)
            else:
                keys = f"{self._spec.messages_key!r} nor {self._spec.prompt_key!r} and {self._spec.response_key!r}"
                raise SpecError(f"{where}: neither {keys} are among the fields of the row, {sorted(row)}")

    def _conversation(self, row: dict[str, Any], where: str) -> SftSample:
        key = self._spec.messages_key
        if not self._tokenizer.chat_template:
            raise SpecError(f"{where}: field {key!r}: the tokenizer has no chat template; give prompt and response")
        if not self._tokenizer.is_fast:
            raise SpecError(f"{where}: field {key!r}: the tokenizer has no tokenizer.json; give prompt and response")
        try:
            messages = check_messages(row[key])
            tools = row.get(TOOLS_KEY) or None
            sample = tokenise_conversation(messages, tools, self._tokenizer, self._stop_ids)
            if (largest := max(sample.tokens)) >= self._vocabulary:
                raise ValueError(f"token {largest} is outside the vocabulary of {self._vocabulary}")
            return sample
        except ValueError as error:
            raise SpecError(f"{where}: field {key!r}: {error}") from None

    def _pair(self, row: dict[str, Any], where: str) -> SftSample:
        prompt, response = (self._tokens(row, key, where) for key in (self._spec.prompt_key, self._spec.response_key))
        mask = [1] * len(response) if row.get(MASK_KEY) is None else row[MASK_KEY]
        if not isinstance(mask, list) or len(mask) != len(response) or not all(_is_bit(one) for one in mask):
            raise SpecError(f"{where}: field {MASK_KEY!r} must have 0 or 1 for each of the {len(response)} tokens")
        try:
            return make_sample([*prompt, *response], [*[0] * len(prompt), *mask])
        except ValueError as error:
            raise SpecError(f"{where}: field {self._spec.response_key!r}: {error}") from None

    def _tokens(self, row: dict[str, Any], key: str, where: str) -> list[int]:
        value = field_of(row, key, where)
        if isinstance(value, str):
            value = self._tokenizer.encode(value, add_special_tokens=False)
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise SpecError(f"{where}: field {key!r} must be text or a list of token ids")
        if not value:
            raise SpecError(f"{where}: field {key!r} is empty")
        if strange := [one for one in value if not 0 <= one < self._vocabulary]:
            raise SpecError(
                f"{where}: field {key!r}: token {strange[0]} is outside the vocabulary of {self._vocabulary}"
            )
        return value


def _is_bit(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def check_messages(value: Any) -> list[Message]:
    """Messages without what is null in them, as Parquet has it. Raises ValueError for what is no conversation."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise ValueError("must be a list of {role, content} messages")
    messages = [{key: part for key, part in one.items() if part is not None} for one in value]
    for at, one in enumerate(messages):
        if "tool_calls" in one:
            one.setdefault("content", "")
        if not isinstance(one.get("role"), str) or not isinstance(one.get("content"), str):
            raise ValueError(f"message {at} needs a role and a content, both text")
        if one["role"] not in ROLES and (meant := get_close_matches(one["role"], ROLES)):
            raise ValueError(f"message {at}: unknown role {one['role']!r}; {meant[0]!r} is meant?")
        if one.get(STEP_LOSS_MASK, 1) not in (0, 1):
            raise ValueError(f"message {at}: {STEP_LOSS_MASK} must be 0 or 1")
    if all(one["role"] != ASSISTANT for one in messages):
        raise ValueError(f"no message has the role {ASSISTANT!r}, so there is nothing to learn")
    if messages[0]["role"] == ASSISTANT:
        raise ValueError("message 0 is the assistant's, which nothing prompts")
    return messages
