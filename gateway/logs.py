"""Structured logs on stdout. They never contain the content of a request: no prompt, no key, no header."""

from __future__ import annotations

import logging
import sys

import structlog

from gateway.settings.gateway_settings import LogSettings


def configure(settings: LogSettings, **who: str) -> None:
    """Set up structlog and the standard library's logging once for the whole process. Every line contains `who`."""
    level = getattr(logging, settings.level.upper())
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if settings.format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stdout.isatty())
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**who)
    _tell_of_libraries(max(level, logging.WARNING), shared, renderer)


def _tell_of_libraries(
    level: int, shared: list[structlog.typing.Processor], renderer: structlog.typing.Processor
) -> None:
    """Their warnings have the same form as our own events."""
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # it would print what a library had to say, whatever that is
