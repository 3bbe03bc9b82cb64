"""Grading."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from services.common.spec.base import HOOK, Strict

BUILT_IN_GRADERS = ("deepscaler", "deepscaler_plus", "math", "dapo", "f1", "gpqa", "ifbench")
REMOTE_GRADER = "remote"
REMOTE_URL = r"(https?://\S+|grpc://[^\s/]+:\d+/\S+)?"
MAX_CUSTOM_TIMEOUT_S = 600.0
BOXED = "boxed_"
"""Before a grader's name: only the last box of the response is graded."""


def check_built_in(grader: str, others: str = "") -> None:
    """Raise ValueError if there is no built-in grader of this name; `others` are more names to offer."""
    if grader.removeprefix(BOXED) not in BUILT_IN_GRADERS:
        raise ValueError(f"unknown grader {grader!r}; there are: {', '.join(BUILT_IN_GRADERS)}{others}")


class RewardValues(Strict):
    """What verdicts are worth; graders with partial credit (`f1`, the user's own) say what a score is worth."""

    correct: float = 1.0
    """The answer equals the label."""
    wrong: float = 0.0
    """It does not."""
    no_answer: float = 0.0
    """There is no answer in the response."""
    no_think_tag: float = 0.0
    """The response never ends its thinking, and the grader asks for that."""
    truncated: float = 0.0
    """The response was cut off by its length before it gave an answer."""
    ungradable: float = 0.0
    """No response could be graded against the label."""
    timeout: float = 0.0
    """The grader did not finish within its deadline."""
    error: float = 0.0
    """The grader failed."""


class RewardSpec(Strict):
    """Grading."""

    grader: str = "deepscaler"
    """A built-in grader (docs/rewards.md), with or without `boxed_` before it; `remote`; or a function of your own,
    `package.module:function`. A row with `metadata.rm_type` chooses another built-in one for itself."""
    require_think: bool = True
    """A response that never closes `<think>` gets no reward; off also grades models that do not think aloud."""
    workers: int = Field(default=2, ge=1)
    """Worker processes; while one runs into its deadline, the others answer."""
    timeout_s: float = Field(default=1.0, gt=0)
    """Deadline of one item, from its dispatch to a worker."""
    max_queue: int = Field(default=8192, ge=1)
    """Items that may wait; more are refused."""
    values: RewardValues = RewardValues()
    """What verdicts are worth."""
    remote_url: str = ""
    """Where grader `remote` asks. http(s)://...: POST of JSON {prompt, response, label, metadata}, answered by a number
    or {"reward": number}. grpc://host:port/grader: a service that speaks flotilla.reward.v1."""
    custom_workers: int = Field(default=8, ge=1)
    """Worker processes of grader `remote` or of a function of your own: so many items are graded at a time."""
    custom_timeout_s: float = Field(default=10.0, gt=0, le=MAX_CUSTOM_TIMEOUT_S)
    """Deadline of one item (or group) of these, from its dispatch to a worker."""
    custom_per_group: bool = False
    """The function takes a list, the items of a group, and returns as many rewards, in their order."""

    @field_validator("grader")
    @classmethod
    def _grader_exists(cls, value: str) -> str:
        if value != REMOTE_GRADER and not re.fullmatch(HOOK, value):
            check_built_in(value, f", {REMOTE_GRADER}, package.module:function")
        return value

    @model_validator(mode="after")
    def _custom_fields_fit(self) -> Self:
        if (self.grader == REMOTE_GRADER) != bool(self.remote_url):
            raise ValueError('reward.remote_url belongs to reward.grader = "remote": give both or none')
        if not re.fullmatch(REMOTE_URL, self.remote_url):
            raise ValueError("reward.remote_url must be http(s)://host..., or grpc://host:port/grader")
        if self.custom_per_group and ":" not in self.grader:
            raise ValueError("reward.custom_per_group belongs to a function of your own in reward.grader")
        return self

    @property
    def is_custom(self) -> bool:
        """Whether the grader is none of the built-in ones."""
        return self.grader == REMOTE_GRADER or ":" in self.grader
