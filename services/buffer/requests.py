"""What every method does with its request: checks of ids, and pages."""

from __future__ import annotations

import base64

from services.buffer.run import Run
from services.common.errors import InvalidArgument

MAX_START = 1 << 48


def require(request: object, run: Run, *fields: str) -> None:
    """Raise if a request is for another run, or if one of its fields is empty."""
    run.check_run_id(request.run_id)  # pyright: ignore[reportAttributeAccessIssue]
    for field in fields:
        if not getattr(request, field):
            raise InvalidArgument(f"{field} is empty", field)


def page_size(wanted: int, default: int, most: int) -> int:
    """Entries in a page; 0 wants the default. Raises InvalidArgument."""
    if wanted < 0:
        raise InvalidArgument("page_size is negative", "page_size")
    return min(wanted or default, most)


def page_token(start: int) -> str:
    """Names the entry that the next page begins with."""
    return base64.urlsafe_b64encode(str(start).encode()).decode()


def page_start(token: str) -> int:
    """The entry that a page begins with. Raises InvalidArgument for a token that we did not give."""
    try:
        start = int(base64.urlsafe_b64decode(token)) if token else 0
    except ValueError:
        start = -1
    if not 0 <= start <= MAX_START:
        raise InvalidArgument(f"page_token {token!r} is not one that this service gave", "page_token")
    return start
