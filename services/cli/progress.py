"""How far a long command is, in bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

LINE_EVERY_S = 60.0


@contextmanager
def byte_progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, elsewhere a line a minute, both on stderr.

    Args:
        what: Is being done.
        total: Bytes in all.
        done: Bytes that were done before.

    Yields:
        To be called with the bytes done since the last call, by any thread.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(what, total, done).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda count: bar.advance(task, count)


class _Lines:
    def __init__(self, what: str, total: int, done: int) -> None:
        self._what, self._total, self._done = what, total, done
        self._said = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if time.monotonic() - self._said >= LINE_EVERY_S:
                self._said = time.monotonic()
                typer.echo(f"{self._what}: {decimal(self._done)} of {decimal(self._total)}", err=True)
