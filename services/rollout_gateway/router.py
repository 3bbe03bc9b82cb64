"""Which engine takes a group: the least loaded one with a free place.

Invariant: `load` of an engine is the sum of what `take` added and `give_back` has not removed. A group goes to one
engine as a whole, so the last one may exceed the limit. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from services.rollout_gateway.registry import Engine
from services.rollout_gateway.spans import Version


class Router:
    """One semaphore an engine, counted in samples."""

    def __init__(self, limit: int) -> None:
        """Args:
        limit: Samples that one engine may run at once.
        """
        self.limit = limit
        self._load: Counter[str] = Counter()

    def load(self, engine: Engine) -> int:
        """Samples that run on this incarnation."""
        return self._load[engine.incarnation]

    def capacity(self, engines: Sequence[Engine]) -> int:
        """Samples that the engines that serve may run at once."""
        return self.limit * sum(engine.serves(None) for engine in engines)

    def pick(self, engines: Sequence[Engine], required: Version | None) -> Engine | None:
        """The engine for the next group, or None if all are full or none serves."""
        able = [engine for engine in engines if engine.serves(required) and self.load(engine) < self.limit]
        return min(able, key=lambda engine: (self.load(engine), engine.engine_id), default=None)

    def take(self, engine: Engine, samples: int) -> None:
        """Count samples that start on an engine."""
        self._load[engine.incarnation] += samples

    def give_back(self, engine: Engine, samples: int) -> None:
        """Count samples that ended on an engine."""
        self._load[engine.incarnation] -= samples
        assert self._load[engine.incarnation] >= 0, f"more samples ended on {engine.engine_id} than started"
        if not self._load[engine.incarnation]:
            del self._load[engine.incarnation]
