"""Sleep and pause, as in vLLM 0.33 with VLLM_SERVER_DEV_MODE=1.

/health stays good. While the engines sleep, requests are taken and wait. While they are paused by `abort`, requests are
refused. A sleep from level 1 on clears the caches, and so does a pause unless told otherwise. No step runs
then, so the event that says so comes with the first step after the wake-up. The metric tells of sleep, /is_sleeping of
both.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.simulator.engine import SimEngine
from gateway.simulator.errors import RequestRefused

_TAGS = frozenset({"weights", "kv_cache"})


class Sleep:
    """Whether one replica's engines sleep or are paused."""

    def __init__(self, engines: Sequence[SimEngine]) -> None:
        self._engines = engines
        self._sleeping_tags: frozenset[str] = frozenset()
        self._refuses = False
        self.is_paused = False
        self.level: int | None = None
        """As the metric tells it; None while it says that the engines are awake."""

    @property
    def is_sleeping(self) -> bool:
        return self.is_paused or bool(self._sleeping_tags)

    def refuse_if_paused(self) -> None:
        """Raises a 503."""
        if self._refuses:
            message = "Generation is paused. Please retry after it resumes."
            raise RequestRefused(503, message, None, "ServiceUnavailableError")

    def sleep(self, level: int, mode: str) -> None:
        self._pause(mode, clear_cache=level >= 1)
        if level >= 1:
            self._sleeping_tags = _TAGS
        self.level = level

    def wake_up(self, tags: Sequence[str]) -> bool:
        """Whether all is awake. Without tags, all wakes up."""
        self._sleeping_tags -= frozenset(tags) or _TAGS
        if self._sleeping_tags:
            return False
        self.level = None
        self.resume()
        return True

    def pause(self, mode: str, clear_cache: bool) -> None:
        self._pause(mode, clear_cache)
        self._refuses = mode != "keep"

    def resume(self) -> None:
        self._refuses = self.is_paused = False
        for engine in self._engines:
            engine.set_paused(False)

    def _pause(self, mode: str, clear_cache: bool) -> None:
        self.is_paused = True
        for engine in self._engines:
            engine.set_paused(True)
            if mode == "abort":
                engine.abort_all()
            if clear_cache:
                engine.reset_caches()
