"""Says in the log what went wrong in graders, the same only once a minute: a grader may fail on every response."""

from __future__ import annotations

from services.common.logs import get_logger
from services.common.service import now_s

MAX_COMPLAINTS = 100
"""Different failures that are logged in COMPLAINTS_S; the metrics count them all."""
COMPLAINTS_S = 60.0

log = get_logger(__name__)


class Complaints:
    """What has been said lately; use from one event loop."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._since_s = now_s()

    def complain(self, failure: str) -> None:
        """Log a failure, unless it is empty or was said already."""
        if now_s() - self._since_s > COMPLAINTS_S:
            self._said.clear()
            self._since_s = now_s()
        if failure and failure not in self._said and len(self._said) < MAX_COMPLAINTS:
            self._said.add(failure)
            log.warning("a grader failed", error=failure)
