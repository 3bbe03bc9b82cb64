"""What the model of the ledger keeps about groups and batches, and the rules that it goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.buffer.states import State

RESPONSE_TOKENS = 2
"""Length of every finished response."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the run spec says about the ledger; names as there."""

    num_rollout: int
    batch_size: int
    group_size: int
    over_sampling: int
    refill: str
    seal_window: int
    partial_rollout: bool
    max_staleness: int
    sample_age: int
    max_attempts: int
    ttl_ms: int = 30_000


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tokens [begin, end) of an unfinished sample, with the oldest and the newest step that produced them."""

    index: int
    begin: int
    end: int
    oldest: int
    newest: int


@dataclass(slots=True)
class Group:
    """A group; `step` is that of the version to evaluate, -1 for training."""

    gid: str
    issue: int
    size: int
    prompt: int = -1
    step: int = -1
    state: State = State.WAITING
    attempts: int = 0
    failures: int = 0
    token: str = ""
    done_token: str = ""
    worker: str = ""
    deadline: int = 0
    reason: str = ""
    batch: int = -1
    kept_order: int = 0
    oldest: int | None = None
    """Oldest policy step in anything kept of it."""
    finished: dict[int, int] = field(default_factory=dict)
    """Oldest step of each finished sample."""
    partial: dict[int, list[Fragment]] = field(default_factory=dict)
    """What is saved of unfinished samples."""
    partial_steps: set[int] = field(default_factory=set)
    """Oldest and newest steps of all that was saved since tokens were last thrown away."""

    @property
    def tokens(self) -> int:
        """Response tokens that are kept of it."""
        return self.partial_tokens + RESPONSE_TOKENS * len(self.finished)

    @property
    def evaluates(self) -> bool:
        """True for a group of an evaluation."""
        return self.step >= 0

    @property
    def partial_tokens(self) -> int:
        """Saved tokens of unfinished samples."""
        return sum(parts[-1].end for parts in self.partial.values())

    def note_age(self, step: int) -> None:
        """Something of this policy step is kept."""
        if not self.evaluates:
            self.oldest = step if self.oldest is None else min(self.oldest, step)

    def recount_age(self) -> None:
        """The age of what is kept, without that of a lease."""
        if not self.evaluates:
            self.oldest = min([*self.finished.values(), *self.partial_steps], default=None)


@dataclass(slots=True)
class Batch:
    """A sealed batch."""

    number: int
    digest: str
    groups: list[str]
    state: State = State.READY
    commits: int = 0
