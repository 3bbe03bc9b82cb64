"""Which tokens of a conversation are learned: those of the assistant's turns, to the end of each.

A template may say itself what is the assistant's ({% generation %}). Else a turn is what the template writes behind the
prompt that it gives the model for it; that must be the same whatever follows, or the row is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from services.trainer.sft.samples import SftSample, make_sample

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"
"""The role whose turns are learned."""
STEP_LOSS_MASK = "step_loss_mask"
"""In a message of the assistant: 0 leaves the turn out of the loss, as for slime."""

INSTEAD = "give prompt and response instead of messages"
"""What to do about a row whose turns cannot be found."""

Message = dict[str, Any]


def tokenise_conversation(
    messages: Sequence[Message], tools: list[Any] | None, tokenizer: Any, stop_ids: Collection[int]
) -> SftSample:
    """Render and tokenise a conversation, and find what is learned of it.

    Args:
        messages: In the format of OpenAI, checked.
        tools: For the template.
        tokenizer: A fast one, which knows where its tokens lie in the text, with a chat template.
        stop_ids: Tokens that end a response; what the template writes after the last of them in a turn is not learned.

    Raises:
        ValueError: The template refuses the conversation, or turns cannot be found.
    """
    learned = [one["role"] == ASSISTANT and one.get(STEP_LOSS_MASK, 1) == 1 for one in messages]
    plain = [{key: value for key, value in one.items() if key != STEP_LOSS_MASK} for one in messages]
    marked = GENERATION.search(tokenizer.get_chat_template(tools=tools))
    try:
        tokens, turns = (_marked_turns if marked else _prompted_turns)(plain, learned, tools, tokenizer)
    except (TemplateError, TypeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"the chat template refuses it: {error}") from None
    mask = bytearray(len(tokens))
    for turn in turns:
        end = max((place + 1 for place in turn if tokens[place] in stop_ids), default=turn.stop)
        mask[turn.start : end] = b"\1" * (end - turn.start)
    return make_sample(tokens, mask)


def _marked_turns(
    messages: list[Message], learned: list[bool], tools: list[Any] | None, tokenizer: Any
) -> tuple[list[int], list[range]]:
    """By the template's own marks."""
    found = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    turns, place = [], 0
    for value, run in groupby(found["assistant_masks"]):
        length = len(list(run))
        turns += [range(place, place + length)] * value
        place += length
    assistants = [is_learned for is_learned, one in zip(learned, messages, strict=True) if one["role"] == ASSISTANT]
    if len(turns) != len(assistants):
        raise ValueError(
            f"the chat template marks {len(turns)} turns, and there are {len(assistants)} of the assistant; {INSTEAD}"
        )
    return found["input_ids"], [turn for turn, is_learned in zip(turns, assistants, strict=True) if is_learned]


def _prompted_turns(
    messages: list[Message], learned: list[bool], tools: list[Any] | None, tokenizer: Any
) -> tuple[list[int], list[range]]:
    """By rendering what comes before and after each turn."""

    def render(count: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    text = render(len(messages), False)
    spans = []
    for at in (at for at, is_learned in enumerate(learned) if is_learned):
        before, after = render(at, True), render(at + 1, False)
        if not after.startswith(before):
            raise ValueError(
                f"the chat template does not write message {at} behind the prompt that it gives for it; {INSTEAD}, or "
                "a template with {% generation %}"
            )
        if not text.startswith(after):
            raise ValueError(
                f"the chat template writes message {at} otherwise when others follow; give one row for each answer, "
                f"with {STEP_LOSS_MASK} = 0 in those before it, or a template with {{% generation %}}"
            )
        spans.append((len(before), len(after)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begins = [begin for begin, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], [range(bisect_left(begins, one), bisect_left(begins, end)) for one, end in spans]
