"""Which policy version produced which response tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One set of weights."""

    run_epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.run_epoch}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """The inverse of str()."""
        run_epoch, step = text.split(":")
        return cls(int(run_epoch), int(step))


@dataclass(frozen=True, slots=True)
class Span:
    """The weights that produced tokens [begin, end)."""

    begin: int
    end: int
    version: Version


Start = tuple[Version, int]
"""A version and the first token that it produced."""


def spans_between(starts: Sequence[Start], begin: int, end: int) -> list[Span]:
    """The part of a history that falls into tokens [begin, end), in the positions of the history.

    Args:
        starts: Every version that the response has seen, in order; the first one starts at or before `begin`.
        begin: First token of interest.
        end: One past the last.
    """
    stops = [position for _, position in starts[1:]] + [end]
    history = (Span(start, stop, version) for (version, start), stop in zip(starts, stops, strict=True))
    return clipped(history, begin, end)


def clipped(spans: Iterable[Span], begin: int, end: int) -> list[Span]:
    """The part of spans that falls into tokens [begin, end); positions stay."""
    cut = (Span(max(span.begin, begin), min(span.end, end), span.version) for span in spans)
    return [span for span in cut if span.begin < span.end]


def joined(spans: Iterable[Span]) -> list[Span]:
    """The same spans, neighbours of one version made one; they must follow each other without gaps."""
    result: list[Span] = []
    for span in spans:
        if result and result[-1].version == span.version:
            assert result[-1].end == span.begin, f"gap between {result[-1]} and {span}"
            result[-1] = Span(result[-1].begin, span.end, span.version)
        else:
            result.append(span)
    return result


def shifted(spans: Iterable[Span], offset: int) -> list[Span]:
    """The spans, `offset` tokens later."""
    return [Span(span.begin + offset, span.end + offset, span.version) for span in spans]


def loss_mask(spans: Sequence[Span], *, mask_offpolicy: bool) -> list[int]:
    """1 for each token to train on, else 0.

    Args:
        spans: They cover a response without gaps.
        mask_offpolicy: Leave out tokens of an older step than that of the weights that finished the response.
    """
    mask: list[int] = []
    for span in spans:
        left_out = mask_offpolicy and span.version.step < spans[-1].version.step
        mask += [int(not left_out)] * (span.end - span.begin)
    return mask
