"""The entry point, and imports that take seconds: a Ctrl-C meanwhile ends the process without a word."""

try:
    import os
    import signal
    from collections.abc import Iterator
    from contextlib import contextmanager
except KeyboardInterrupt:
    raise SystemExit(130) from None

EXIT_INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def loading() -> Iterator[None]:
    """For imports in the main thread, which an exception at any line could leave half done."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """The `flotilla` command."""
    with loading():
        from services.cli.main import app

    app()


if __name__ == "__main__":
    main()
