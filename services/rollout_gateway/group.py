"""A group under generation: what has been asked for and what has come so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from services.rollout_gateway.spans import Span, Version, joined, shifted


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


@dataclass(slots=True)
class SampleProgress:
    """One response as it grows. Invariant: token_ids, log_probs and loss_mask are equally long; spans cover them."""

    index: int
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish: Finish | None = None
    kept: int = 0
    """Tokens that came with the lease; these are never thrown away."""
    segment_begin: int = 0
    """First token of the engine request that runs."""

    def begin_segment(self, version: Version | None) -> None:
        """Before a request to an engine with `version`: drop what an engine with other weights left unfinished."""
        if len(self.token_ids) > self.kept and self.spans[-1].version != version:
            self._drop_after(self.kept)
        self.segment_begin = len(self.token_ids)

    def extend(
        self, token_ids: Sequence[int], log_probs: Sequence[float], spans: Sequence[Span], finish: Finish | None
    ) -> None:
        """Add what the engine sent; its spans count from the start of the segment."""
        assert self.finish is None, "tokens after the end of a response"
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.loss_mask += [1] * len(token_ids)
        self.spans = joined([*self.spans, *shifted(spans, self.segment_begin)])
        self.finish = finish

    def _drop_after(self, length: int) -> None:
        del self.token_ids[length:], self.log_probs[length:], self.loss_mask[length:]
        cut = [Span(span.begin, min(span.end, length), span.version) for span in self.spans]
        self.spans = [span for span in cut if span.begin < span.end]


@dataclass(slots=True)
class Group:
    """The unfinished samples of one prompt."""

    group_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    samples: list[SampleProgress]
    required_version: Version | None = None

    def unfinished(self) -> list[SampleProgress]:
        """Samples that need more tokens."""
        return [sample for sample in self.samples if sample.finish is None]
