"""Counts the streams of a run's gateways, and how many of them another replica could have gone on with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

import httpx

_COUNT = re.compile(r'^kvgate_streams_total\{resumable="(\w+)"\} (\S+)$', re.MULTILINE)

_PATIENCE_S = 2.0


class Streams:
    """Those of all clusters of this run, as their gateways count them."""

    def __init__(self) -> None:
        self._by_answer = Counter[str]()
        self._is_asked = False

    def ask(self) -> None:
        """Somebody wants to know, from now on."""
        self._is_asked = True

    def read(self, urls: Iterable[str]) -> None:
        """Adds the counts of gateways that are about to stop. One that does not answer any more tells nothing."""
        for url in urls if self._is_asked else ():
            with suppress(httpx.HTTPError):
                for answer, count in _COUNT.findall(httpx.get(f"{url}/metrics", timeout=_PATIENCE_S).text):
                    self._by_answer[answer] += round(float(count))

    def as_dict(self) -> dict[str, int]:
        """`yes`, or why another replica could not have gone on, and how many streams."""
        return dict(self._by_answer)

    def show(self) -> None:
        """Prints them, if there were any. Those of gateways that were told to resume nothing do not count."""
        if total := self._by_answer.total() - self._by_answer["off"]:
            yes = self._by_answer["yes"]
            print(f"{total:,} streams; {yes:,} ({yes / total:.1%}) could have gone on at another replica")


STREAMS = Streams()
