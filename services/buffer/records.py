"""What the ledger keeps about groups and samples, as Python records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from services.buffer.states import State

Fields = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class SampleHeader:
    """What the ledger knows about a finished sample without its tokens."""

    prompt_tokens: int
    response_tokens: int
    loss_tokens: int
    """Sum of the loss mask."""
    finish_reason: int
    oldest_step: int
    """Oldest policy step in its spans."""
    versions: list[str]
    """Policy versions in its spans, as `epoch:step`."""

    @staticmethod
    def parse(text: bytes) -> SampleHeader:
        """From the JSON in the ledger."""
        return SampleHeader(*json.loads(text))

    def dump(self) -> str:
        """To JSON."""
        return json.dumps([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class FinishedSample:
    """A sample on its way into the ledger."""

    index: int
    header: SampleHeader
    payload: bytes

    @property
    def content_hash(self) -> str:
        """SHA-256 of the payload, in hexadecimal."""
        return hashlib.sha256(self.payload).hexdigest()


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tokens of an unfinished sample on their way into the ledger."""

    index: int
    begin: int
    """Response token that the first one is."""
    tokens: int
    oldest_step: int
    newest_step: int
    payload: bytes
    """Serialized SampleFragment."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A lease that must end."""

    group_id: str
    token: str
    reason: str
    """Name of a StopReason, without prefix."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that is held."""

    group_id: str
    expires_in_ms: int
    stop_reason: str
    """Name of a StopReason, without prefix; '' if it may go on."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group as the ledger has it."""

    group_id: str
    fields: Fields

    @property
    def state(self) -> State:
        """Where it is."""
        return State(self.text("state"))

    @property
    def is_evaluation(self) -> bool:
        """True for a group that measures a version."""
        return self.group_id.startswith("e")

    @property
    def prompt_number(self) -> int:
        """Where its prompt comes in the order of the data."""
        return self.number("prompt", self.number("issue"))

    def number(self, name: str, default: int = 0) -> int:
        """An integer field."""
        return int(self.fields.get(name.encode(), default))

    def text(self, name: str) -> str:
        """A text field; '' if unset."""
        return self.fields.get(name.encode(), b"").decode()

    def partial_tokens(self) -> dict[int, int]:
        """Saved tokens of unfinished samples, by index."""
        return {int(k[2:]): int(v) for k, v in self.fields.items() if k.startswith(b"p:")}

    def headers(self) -> dict[int, SampleHeader]:
        """Headers of the finished samples, by index."""
        found = {int(k[2:]): SampleHeader.parse(v) for k, v in self.fields.items() if k.startswith(b"h:")}
        return dict(sorted(found.items()))

    def content_hash(self, index: int) -> str:
        """Hash of a finished sample's payload."""
        return self.text(f"hash:{index}")

    def graded(self, rewards: Sequence[float], verdicts: Sequence[str]) -> Group:
        """The group with its rewards."""
        known = {b"rewards": json.dumps(list(rewards)).encode(), b"verdicts": json.dumps(list(verdicts)).encode()}
        return Group(self.group_id, self.fields | known)

    def rewards(self) -> list[float]:
        """Rewards by sample; empty before grading."""
        return json.loads(self.text("rewards") or "[]")

    def verdicts(self) -> list[str]:
        """Verdict and reason by sample; empty before grading."""
        return json.loads(self.text("verdicts") or "[]")


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one instant."""

    run: dict[str, str]
    train: dict[State, int]
    evaluation: dict[State, int]
    dropped: dict[str, int]
    failed: dict[str, int]
    stale: dict[str, int]
    discarded: dict[str, int]
    """Response tokens that were thrown away, by reason."""
    leases: int

    def number(self, name: str, default: int = 0) -> int:
        """An integer fact of the run."""
        return int(self.run.get(name, default))
