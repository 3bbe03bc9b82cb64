"""Logs: JSON lines in a service, colours on a terminal."""

from __future__ import annotations

import logging
import sys

import structlog


def setup_logging(service: str, run_id: str) -> None:
    """Send structlog and the standard logging module to standard error, with service and run_id on every line."""
    shared = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    tracebacks = [] if terminal else [structlog.processors.format_exc_info]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tracebacks, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    structlog.contextvars.bind_contextvars(service=service, run_id=run_id)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module."""
    return structlog.stdlib.get_logger(name)
