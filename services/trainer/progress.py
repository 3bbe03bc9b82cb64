"""What a rank is at: written by the thread that computes, read by everybody."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Safe to use from several threads: each field is replaced whole, and nobody needs all of one moment."""

    doing: str = "nothing"
    count: int = 0
    """Grows with everything that is begun."""
    since_s: float = field(default_factory=time.monotonic)
    """Monotonic time when it was begun."""

    def begin(self, what: str) -> None:
        """Something is begun, and what was before is over."""
        self.doing, self.since_s = what, time.monotonic()
        self.count += 1
