"""Calls that outlast the restart of a peer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from services.common.board import StatusBoard
from services.common.errors import DeadlineExceeded
from services.common.rpc import call

PATIENCE_S = 900.0
"""Time that a peer may be away; longer means that somebody must look."""
ATTEMPT_S = 20.0
"""Deadline of one attempt, beyond what a long poll waits on purpose."""
POLL_S = 10.0
"""How long a long poll waits at the peer."""
HEARTBEAT_S = 2.0
"""How soon a peer that restarted is told again."""

R = TypeVar("R")


async def insist(
    board: StatusBoard,
    waiting_for: str,
    method: Callable[..., Awaitable[R]],
    request: Any,
    *,
    poll_s: float = 0.0,
    patience_s: float = PATIENCE_S,
) -> R:
    """Call until there is an answer; the method must be safe to repeat.

    Args:
        board: Shows `waiting_for` meanwhile.
        waiting_for: What the process waits for.
        method: A stub's method.
        request: Its request, repeated unchanged.
        poll_s: How long the request has the peer wait.
        patience_s: How long the peer may be away or silent.

    Raises:
        FlotillaError: What the peer answered; Unavailable or DeadlineExceeded after `patience_s`.
    """
    give_up = time.monotonic() + patience_s
    with board.waiting(waiting_for):
        while True:
            try:
                left = max(0.0, give_up - time.monotonic())
                return await call(method, request, timeout_s=poll_s + ATTEMPT_S, patience_s=left)
            except DeadlineExceeded:
                if time.monotonic() >= give_up:
                    raise
