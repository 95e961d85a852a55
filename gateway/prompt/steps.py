"""A bound on the work of reading one prompt.

Messages, content parts and fields cost a few microseconds each, whatever their size. The event loop reads prompts that
have few of them; a worker process reads the others (gateway/request/reading/).
"""

from __future__ import annotations


class TooManySteps(Exception):
    """Reading this prompt takes longer than the caller allows."""


class Steps:
    """Counts the elements that are read. One step is one message, part, field or other element."""

    __slots__ = ("_left",)

    def __init__(self, limit: int) -> None:
        self._left = limit

    def take(self, count: int) -> None:
        """Count `count` elements before they are read. Raises TooManySteps beyond the limit."""
        self._left -= count
        if self._left < 0:
            raise TooManySteps


UNBOUNDED = 2**62
