"""What decides whether a graded group is kept, and which interrupted groups go on: built in, or a hook of the user's.

The types here are what a hook gets; `docs/hooks.md` shows how to write one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.buffer.hooks import DEADLINE_S, HookFailed, HookHangs, hook_name, load_function, noted, run_hook

MIN_STD = 1e-6
"""A group whose rewards spread less teaches nothing: every advantage would be 0."""
MAX_REASON_CHARS = 64
"""A reason is a key of the counts of dropped groups."""
CHOICE_DEADLINE_S = 2.0
"""Longest choice of a buffer filter: a gateway's call waits for it, with few seconds to spare."""
FILTER_FIELD = "rollout.dynamic_sampling_filter"
BUFFER_FILTER_FIELD = "rollout.buffer_filter"


@dataclass(frozen=True, slots=True)
class SampledSample:
    """One finished and graded response."""

    index: int
    """Position in its group, from 0."""
    response: str
    """The response as text, special tokens included; '' where GroupFilter.needs_text is off."""
    response_tokens: int
    """Length of the response."""
    reward: float
    verdict: str
    """SCORED, UNGRADABLE, TIMEOUT or ERROR."""
    reason: str
    """CORRECT, WRONG, NO_ANSWER, NO_THINK_TAG, TRUNCATED or UNSPECIFIED."""
    truncated: bool
    """True if the response was cut off by its length."""
    oldest_step: int
    """Oldest policy step among its tokens."""


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """All responses to one prompt."""

    group_id: str
    prompt: str
    """The rendered prompt as text; '' where GroupFilter.needs_text is off."""
    label: str
    samples: tuple[SampledSample, ...]
    """All of the group, by index."""

    @property
    def rewards(self) -> list[float]:
        """The reward of each sample. Raises ValueError if one is not a finite number."""
        for sample in self.samples:
            if not isinstance(sample.reward, int | float) or not math.isfinite(sample.reward):
                raise ValueError(
                    f"the reward of sample {sample.index} of group {self.group_id} is {sample.reward}; "
                    "it must be a finite number"
                )
        return [float(sample.reward) for sample in self.samples]


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """An interrupted group, with what is saved of it."""

    group_id: str
    prompt_index: int
    """Row of its prompt in the data file, from 1."""
    label: str
    attempts: int
    """Leases so far."""
    finished_samples: int
    partial_tokens: int
    """Saved tokens of its unfinished samples."""
    oldest_step: int
    """Oldest policy step in anything that is saved of it."""
    age: int
    """Number of the batch that is being filled minus oldest_step."""


Decision: TypeAlias = tuple[bool, str]
"""Whether to keep a group, and the reason if not."""
Filter: TypeAlias = Callable[[SampledGroup], Decision | Awaitable[Decision]]
BufferFilter: TypeAlias = Callable[[int, Sequence[BufferedGroup], int], Sequence[str] | Awaitable[Sequence[str]]]
"""From the number of the batch that is being filled, the interrupted groups (oldest first) and how many are wanted, to
the ids of those that go on, in that order."""


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """A dynamic-sampling filter."""

    function: Filter
    keep_when_insufficient: bool = False
    """Keep nevertheless what the function drops, where too few groups would be left; for the ledger to apply."""
    needs_text: bool = False
    """True for a hook: it gets the prompt and the responses as text."""


def keep_all(group: SampledGroup) -> Decision:
    """Keeps every group."""
    return True, ""


def nonzero_std(group: SampledGroup) -> Decision:
    """Keeps a group if the unbiased std of its rewards exceeds 1e-6: DAPO's dynamic sampling (arXiv 2503.14476).

    `statistics.stdev` is exact: equal rewards have std 0, however large, and a large mean hides no spread."""
    rewards = group.rewards
    std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return (True, "") if std > MIN_STD else (False, f"zero_std_{round(rewards[0], 1)}")


BUILT_IN = {
    "none": GroupFilter(keep_all),
    "nonzero_std": GroupFilter(nonzero_std),
    "nonzero_std_with_fallback": GroupFilter(nonzero_std, keep_when_insufficient=True),
}


def load_filter(name: str) -> GroupFilter:
    """The filter of this name, or at this import path. Raises SpecError if there is none at it."""
    return BUILT_IN.get(name) or GroupFilter(load_function(name, FILTER_FIELD), needs_text=True)


def load_buffer_filter(path: str) -> BufferFilter:
    """The buffer filter at an import path. Raises SpecError if there is none."""
    return load_function(path, BUFFER_FILTER_FIELD)


async def decide(group_filter: GroupFilter, group: SampledGroup, deadline_s: float = DEADLINE_S) -> Decision:
    """Whether a group is kept, and the reason if not.

    Raises:
        HookFailed: A reward is not finite, or the hook failed; logged and counted.
    """
    with noted(FILTER_FIELD):
        try:
            _ = group.rewards
        except ValueError as error:
            raise HookFailed(str(error)) from None
        function, is_hook = group_filter.function, group_filter.needs_text
        answer = await run_hook(function, group, deadline_s=deadline_s) if is_hook else function(group)
        return _checked_decision(answer, hook_name(function))


async def choose(
    buffer_filter: BufferFilter,
    step: int,
    groups: Sequence[BufferedGroup],
    wanted: int,
    deadline_s: float = CHOICE_DEADLINE_S,
) -> list[str]:
    """Ids of the groups that go on, in order, at most `wanted`; the first of `groups` if the hook fails."""
    try:
        with noted(BUFFER_FILTER_FIELD):
            answer = await run_hook(buffer_filter, step, tuple(groups), wanted, deadline_s=deadline_s)
            return _checked_choice(answer, groups, hook_name(buffer_filter))[:wanted]
    except (HookFailed, HookHangs):
        return [group.group_id for group in groups[:wanted]]


def _checked_decision(answer: Any, name: str) -> Decision:
    match answer:
        case [bool() as keep, str() as reason]:
            if len(reason) > MAX_REASON_CHARS or not reason.isprintable():
                raise HookFailed(f"{name} gave a reason that is not one line of at most {MAX_REASON_CHARS} characters")
            return keep, "" if keep else reason or "no_reason"
        case _:
            raise HookFailed(f"{name} returned {_kind(answer)}; it must return (keep, reason), a bool and a str")


def _checked_choice(answer: Any, groups: Sequence[BufferedGroup], name: str) -> list[str]:
    if not isinstance(answer, list | tuple) or not all(isinstance(one, str) for one in answer):
        raise HookFailed(f"{name} returned {_kind(answer)}; it must return a list of group ids")
    if unknown := set(answer) - {group.group_id for group in groups}:
        raise HookFailed(f"{name} returned {min(unknown)!r}, which is none of the groups that it was given")
    if len(set(answer)) < len(answer):
        raise HookFailed(f"{name} returned a group twice")
    return list(answer)


def _kind(answer: Any) -> str:
    """The type of an answer, and of what is in it."""
    module, kind = type(answer).__module__, type(answer).__name__
    kind = kind if module == "builtins" else f"{module}.{kind}"  # numpy's bool is called bool, too
    if not isinstance(answer, list | tuple):
        return kind
    return f"{kind} of ({', '.join(_kind(one) for one in answer[:3])})"
