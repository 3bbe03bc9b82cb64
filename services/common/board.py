"""What a process is doing and what it waits for: the source of /statusz and /readyz."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StatusBoard:
    """Filled by a service, read by its HTTP endpoints. Safe to use from several threads."""

    service: str
    checks: dict[str, Callable[[], str]] = field(default_factory=dict)
    """Readiness checks by name; each returns '' when all is well, else what is wrong. Must not block."""
    details: Callable[[], dict[str, Any]] = dict
    """Numbers and words for /statusz. Must not block."""
    _waits: dict[int, tuple[str, float]] = field(default_factory=dict)
    _next: int = 0

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show that the process waits for something, until the block ends."""
        self._next += 1
        key = self._next
        self._waits[key] = (what, time.time())
        try:
            yield
        finally:
            del self._waits[key]

    def problems(self) -> dict[str, str]:
        """Readiness checks that fail, with what is wrong."""
        found = {name: check() for name, check in self.checks.items()}
        return {name: problem for name, problem in found.items() if problem}

    def snapshot(self) -> dict[str, Any]:
        """Everything, for /statusz; `since` is Unix time in seconds."""
        return {
            "service": self.service,
            "ready": not self.problems(),
            "problems": self.problems(),
            "waiting_for": [{"what": what, "since": since} for what, since in list(self._waits.values())],
            **self.details(),
        }
