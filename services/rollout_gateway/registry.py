"""Which engines there are: a table whose entries live as long as they are renewed.

Invariant: the revision grows with every change that a reader could see. Pure; the time comes in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from services.common.errors import NotFound
from services.rollout_gateway.spans import Version


class EngineState(Enum):
    """Whether an engine can serve."""

    STALE = "stale"
    SERVING = "serving"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, as it describes itself."""

    engine_id: str
    incarnation: str
    address: str
    state: EngineState
    version: Version | None
    worker_count: int

    def serves(self, required: Version | None) -> bool:
        """True if it can generate now, with the weights of the required step if there is one, in whatever epoch."""
        if self.state is not EngineState.SERVING:
            return False
        return required is None or (self.version is not None and self.version.step == required.step)


class EngineTable:
    """Engines by id."""

    def __init__(self, ttl_s: float, first_revision: int) -> None:
        """Args:
        ttl_s: An entry that is not renewed within it is gone.
        first_revision: Larger than any that an earlier process of the gateway gave out, so that readers notice.
        """
        self.ttl_s = ttl_s
        self.revision = first_revision
        self._engines: dict[str, Engine] = {}
        self._expiry: dict[str, float] = {}

    def list(self) -> list[Engine]:
        """Sorted by id."""
        return [self._engines[engine_id] for engine_id in sorted(self._engines)]

    def is_current(self, engine: Engine) -> bool:
        """True while this incarnation is the one that is known."""
        known = self._engines.get(engine.engine_id)
        return known is not None and known.incarnation == engine.incarnation

    def register(self, engine: Engine, now_s: float) -> None:
        """Make an engine known, in place of an older incarnation."""
        self._put(engine, now_s)

    def renew(self, engine: Engine, now_s: float) -> None:
        """Keep an engine known and note its state. Raises NotFound if this incarnation is not known."""
        if not self.is_current(engine):
            raise NotFound(f"{engine.engine_id} is not registered: register again")
        self._put(engine, now_s)

    def remove(self, engine: Engine) -> bool:
        """Forget an incarnation; if it lives after all, it will register again. True if it was known."""
        known = self.is_current(engine)
        if known:
            del self._engines[engine.engine_id], self._expiry[engine.engine_id]
            self.revision += 1
        return known

    def expire(self, now_s: float) -> list[Engine]:
        """Forget the engines that were not renewed in time, and return them."""
        late = [self._engines[engine_id] for engine_id, expiry in self._expiry.items() if expiry <= now_s]
        for engine in late:
            self.remove(engine)
        return late

    def next_expiry_s(self) -> float | None:
        """When the first entry would expire; None if there is none."""
        return min(self._expiry.values(), default=None)

    def _put(self, engine: Engine, now_s: float) -> None:
        if self._engines.get(engine.engine_id) != engine:
            self._engines[engine.engine_id] = engine
            self.revision += 1
        self._expiry[engine.engine_id] = now_s + self.ttl_s
