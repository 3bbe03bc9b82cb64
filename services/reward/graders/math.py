"""The `math` rule: the last `\\boxed{}` anywhere in the response, compared as `deepscaler` compares.

For models that do not think aloud: `</think>` is not asked for. slime calls this reward `math`.
"""

from __future__ import annotations

from dataclasses import replace

from services.reward.graders import deepscaler
from services.reward.verdicts import Graded, Item, Question

VERSION = f"1-deepscaler-{deepscaler.VERSION}"
decide = deepscaler.decide


def grade_cheaply(item: Item) -> Graded | Question:
    """As `deepscaler.grade_cheaply`, for the last box of the whole response."""
    start = item.response.rfind(deepscaler.BOX)
    box = item.response[start:].partition("</think>")[0] if start >= 0 else ""
    return deepscaler.grade_cheaply(replace(item, response=box, require_think=False))
