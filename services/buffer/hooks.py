"""Functions of the user's, named in the run spec: found at start, called in threads of their own, with a deadline.

A hook that raises or hangs costs what it was asked about, never the service.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from services.common.errors import FailedPrecondition, Unavailable
from services.common.logs import get_logger
from services.common.spec import SpecError

DEADLINE_S = 10.0
"""Longest call of a hook."""
MAX_HANGING = 4
"""Calls past their deadline whose thread still runs, after which no hook is called: a thread cannot be ended."""
MAX_ERROR_CHARS = 500
"""An exception's text is kept with the group, and may quote a whole response."""

FAILURES = Counter("flotilla_buffer_hook_failures_total", "Calls of a hook that failed, by field of the spec", ["hook"])
log = get_logger(__name__)

_hanging: dict[str, set[Future[Any]]] = {}
"""Calls past their deadline, by hook."""


class HookFailed(FailedPrecondition):
    """A hook raised, gave no answer in time, or answered with something else than it must; names the hook."""


class HookHangs(Unavailable):
    """A hook is not called any more, because too many of its calls hang; names the hook."""


def load_function(path: str, field: str) -> Callable[..., Any]:
    """The function at `package.module:function`; the current directory is searched too, as by `python -m`.

    Raises:
        SpecError: There is no such module or function, or it cannot be imported or called; names the field.
    """
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # the module is the user's: its import can raise anything
        raise SpecError(f"{field}: cannot import {module_name}: {_describe(error)}") from error
    if function is None:
        raise SpecError(f"{field}: module {module_name} has no {name}")
    if not callable(function):
        raise SpecError(f"{field}: {path} is a {type(function).__name__}, not a function")
    return function


def hook_name(function: Callable[..., Any]) -> str:
    """`module:name` of a function, for messages."""
    return f"{function.__module__}:{getattr(function, '__name__', type(function).__name__)}"


async def run_hook(function: Callable[..., Any], *args: Any, deadline_s: float = DEADLINE_S) -> Any:
    """Call a hook in a thread of its own; an async one runs there in a loop of its own, so that it cannot block ours.

    Raises:
        HookFailed: It raised (type and text are in the message) or gave no answer in time; or it was not called
            because too many calls hang.
    """
    name = hook_name(function)
    hanging = _hanging[name] = {call for call in _hanging.get(name, ()) if not call.done()}
    if len(hanging) >= MAX_HANGING:
        raise HookHangs(f"{name} is not called: {len(hanging)} calls of it hang; correct it, and restart the buffer")
    call = _start(name, function, args, deadline_s)
    try:
        async with asyncio.timeout(deadline_s):
            return await asyncio.wrap_future(call)
    except TimeoutError:
        raise HookFailed(f"{name} gave no answer in {deadline_s:g} s") from None
    finally:
        if not call.done():
            hanging.add(call)


@contextmanager
def noted(field: str) -> Iterator[None]:
    """Logs and counts a HookFailed that leaves the block, by the field that names the hook."""
    try:
        yield
    except HookFailed as error:
        FAILURES.labels(field.removeprefix("rollout.")).inc()
        log.warning("a hook failed", field=field, error=str(error), exc_info=error.__cause__)
        raise


def _start(name: str, function: Callable[..., Any], args: tuple[Any, ...], deadline_s: float) -> Future[Any]:
    """Run a hook in a daemon thread, which does not keep the process alive as a pool's thread would."""
    call: Future[Any] = Future()
    call.set_running_or_notify_cancel()  # from here on nobody can cancel it: a late answer has a place to go

    def run() -> None:
        try:
            answer = function(*args)
            call.set_result(asyncio.run(_within(answer, deadline_s)) if inspect.isawaitable(answer) else answer)
        except BaseException as error:  # noqa: BLE001  carried over to whoever awaits; a hook may even call sys.exit
            failure = HookFailed(f"{name} raised {_describe(error)}")
            failure.__cause__ = error
            call.set_exception(failure)

    threading.Thread(target=run, name=f"hook {name}", daemon=True).start()
    return call


async def _within(answer: Awaitable[Any], deadline_s: float) -> Any:
    # The caller gives up at the deadline; a little later its thread becomes free.
    async with asyncio.timeout(deadline_s + 0.5):
        return await answer


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    return text.encode(errors="backslashreplace").decode()
