"""What the deterministic engine answers: a pure function of the seed of a sample and of its prompt.

A response names its seed and everything in it follows from that, so whoever holds one can tell whether each of its
tokens is right, however often it was interrupted. Prompts name a number, which is also the label; a response ends with
the number in a box if it is right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from tokenizers import pre_tokenizers

from flotilla.buffer.v1 import buffer_pb2
from flotilla.common.v1 import common_pb2
from tests.tiny_models import SPECIAL_TOKENS

_BYTES = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
_TOKENS = {token: number for number, token in enumerate(_BYTES)}
_END = _TOKENS["<|im_end|>"]
_BEGIN = _TOKENS["<|im_start|>"]
_ROLE = "assistant\n"
"""Stands between the last begin of a message and the response."""
EQUAL_EVERY = 4
"""All responses to one prompt in so many are right: nothing to learn from, as a filter on rewards sees it."""
SHORTEST_FILLER, TAIL = 8, 1.2
"""Lengths are Pareto-distributed with this exponent: most are short, a few reach the limit."""


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response; the lists are equally long."""

    token_ids: list[int]
    log_probs: list[float]
    is_truncated: bool


def respond(seed: int, answer: int, limit: int) -> Response:
    """The response to a prompt that asks for `answer`, of at most `limit` tokens."""
    random = Random(seed)
    filler = "".join(random.choices("abcdefgh", k=int(min(limit, SHORTEST_FILLER * random.paretovariate(TAIL)))))
    right = answer % EQUAL_EVERY == 0 or seed % 2 == 0
    text = f"{seed}:{filler}\\boxed{{{answer if right else answer + 1}}}"
    token_ids = [*(_TOKENS[character] for character in text), _END]
    log_probs = [-(1 + (seed + position) % 7) / 8 for position in range(len(token_ids))]
    return Response(token_ids[:limit], log_probs[:limit], len(token_ids) > limit)


def split_prompt(token_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """A rendered prompt, and the response tokens that follow it."""
    at = max(number for number, token in enumerate(token_ids) if token == _BEGIN) + 1 + len(_ROLE)
    return token_ids[:at], token_ids[at:]


def answer_to(prompt: Sequence[int]) -> int:
    """The number in a rendered prompt."""
    return int(_first(r"\d+", prompt))


def check_sample(row: buffer_pb2.BatchRow, sample: common_pb2.Sample, limit: int) -> None:
    """Assert that a sample is the one that the row names, and that the engine would give it."""
    ids = list(sample.response_token_ids)
    assert (sample.group_id, sample.sample_index) == (row.group_id, row.sample_index), f"{row} came as {sample}"
    whole = respond(int(_first(r"\d+(?=:)", ids)), answer_to(sample.prompt_token_ids), limit)
    assert ids == whole.token_ids, f"tokens of {row} are not what the engine gave"
    assert list(sample.rollout_log_probs) == whole.log_probs, f"log-probs of {row} are not what the engine gave"
    assert len(ids) == row.response_tokens == len(sample.loss_mask)
    ends = [0, *(span.end for span in sample.policy_spans)]
    assert [span.begin for span in sample.policy_spans] == ends[:-1], f"spans of {row} have gaps"
    assert ends[-1] == len(ids), f"spans of {row} do not cover it"


def _first(pattern: str, token_ids: Sequence[int]) -> str:
    found = re.search(pattern, "".join(_BYTES[token] for token in token_ids))
    assert found, f"no {pattern} in {token_ids}"
    return found.group()
