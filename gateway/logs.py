"""Structured logs on stdout. They never contain the content of a request: no prompt, no key, no header."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Final

import structlog

from gateway.settings.gateway_settings import LogSettings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_OURS = logging.getLogger("kvgate")
"""Keeps the level of our own lines."""
_EACH_S: Final = 3600.0


class RareWarning:
    """A warning about something that is seen again and again: with the same fields, it is logged once in an hour."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger, event: str, **always: str) -> None:
        self._log, self._event, self._always = log, event, always
        self._logged_s: dict[tuple[str, ...], float] = {}

    def warn(self, **fields: str) -> None:
        """Each caller gives the same names."""
        values, now_s = tuple(fields.values()), time.monotonic()
        self._logged_s = {each: at_s for each, at_s in self._logged_s.items() if now_s < at_s + _EACH_S}
        if values not in self._logged_s:
            self._logged_s[values] = now_s
            self._log.warning(self._event, **fields, **self._always)


def configure(settings: LogSettings, **who: str) -> None:
    """Set up structlog and the standard library's logging once for the whole process. Every line contains `who`."""
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
        processors=[*shared, _drop_lower, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(**who)
    _tell_of_libraries(shared, renderer)
    set_level(settings.level)


def set_level(name: str) -> None:
    """Less important lines are not written from now on; of libraries, nothing below a warning. (The level of structlog
    itself is fixed in each logger at its first line.)"""
    _OURS.setLevel(_LEVELS[name])
    logging.getLogger().setLevel(max(_LEVELS[name], logging.WARNING))


def _drop_lower(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    if _OURS.isEnabledFor(_LEVELS.get(event["level"], logging.CRITICAL)):
        return event
    raise structlog.DropEvent


def _tell_of_libraries(shared: list[structlog.typing.Processor], renderer: structlog.typing.Processor) -> None:
    """Their warnings have the same form as our own events."""
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler])
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # it would print what a library had to say, whatever that is
