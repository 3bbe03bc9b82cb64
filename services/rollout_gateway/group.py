"""A group under generation: what has been asked for, what has come so far, and how much of it the buffer has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.rollout_gateway.spans import Span, Version, clipped, joined, shifted


class Finish(Enum):
    """How a response ended for good."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens."""

    temperature: float
    top_p: float
    top_k: int
    max_response_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tokens of an unfinished response, from `begin` on; spans count from the start of the response."""

    index: int
    begin: int
    token_ids: list[int]
    log_probs: list[float]
    spans: list[Span]

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.begin + len(self.token_ids)


@dataclass(slots=True)
class SampleProgress:
    """One response as it grows. Invariant: token_ids and log_probs are equally long; spans cover them."""

    index: int
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: Finish | None = None
    kept: int = 0
    """Tokens that came with the lease; these are never thrown away."""
    saved: int = 0
    """Tokens that the buffer has as they are here."""
    segment_begin: int = 0
    """First token of the engine request that runs."""

    def begin_segment(self, version: Version | None, *, continue_across_versions: bool) -> None:
        """Before a request to an engine with `version`: drop what other weights left unfinished, unless it may go on.

        A step that comes again in another epoch stands for the same weights.
        """
        may_go_on = continue_across_versions or (version and self.spans and self.spans[-1].version.step == version.step)
        if not may_go_on:
            self._drop_after(self.kept)
        self.segment_begin = len(self.token_ids)

    def extend(
        self, token_ids: Sequence[int], log_probs: Sequence[float], spans: Sequence[Span], finish: Finish | None
    ) -> None:
        """Add what the engine sent; its spans count from the start of the segment."""
        assert self.finish is None, "tokens after the end of a response"
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.spans = joined([*self.spans, *shifted(spans, self.segment_begin)])
        self.finish = finish

    def unsaved(self) -> Fragment:
        """The tokens that the buffer does not have."""
        return self._fragment(self.saved, len(self.token_ids))

    def note_saved(self, fragment: Fragment) -> None:
        """The buffer has a fragment; that counts unless it was dropped here meanwhile."""
        if fragment.begin <= self.saved and self._fragment(fragment.begin, fragment.end) == fragment:
            self.saved = fragment.end

    def _fragment(self, begin: int, end: int) -> Fragment:
        spans = clipped(self.spans, begin, end)
        return Fragment(self.index, begin, self.token_ids[begin:end], self.log_probs[begin:end], spans)

    def _drop_after(self, length: int) -> None:
        del self.token_ids[length:], self.log_probs[length:]
        self.spans = clipped(self.spans, 0, length)
        self.saved = min(self.saved, length)


@dataclass(slots=True)
class Group:
    """The unfinished samples of one prompt."""

    group_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    samples: list[SampleProgress]
    required_version: Version | None = None
    continue_across_versions: bool = False
    """Whether a sample may be continued by other weights than those that began it."""
    mask_offpolicy: bool = False
    """Whether tokens of older weights than those that finished a sample are left out of training."""

    def unfinished(self) -> list[SampleProgress]:
        """Samples that need more tokens."""
        return [sample for sample in self.samples if sample.finish is None]

    def unsaved(self) -> list[Fragment]:
        """What the buffer does not have of unfinished samples; none where it has everything."""
        fragments = (sample.unsaved() for sample in self.unfinished())
        return [fragment for fragment in fragments if fragment.token_ids]

    def note_saved(self, fragments: Sequence[Fragment]) -> None:
        """The buffer has these."""
        samples = {sample.index: sample for sample in self.samples}
        for fragment in fragments:
            samples[fragment.index].note_saved(fragment)
