"""Bounds the values of labels, because each one is a series of its own in Prometheus."""

from __future__ import annotations

MOST_PAIRS = 200
OTHERS = "others"


class LabelValues:
    """The values of one label, or of several together, so that many of one do not multiply with many of another. Those
    that come first keep theirs; when there are `most`, all others share one."""

    def __init__(self, most: int = 100) -> None:
        self._most = most
        self._known: set[tuple[str, ...]] = set()

    def of(self, *names: str) -> tuple[str, ...]:
        """The values for these names, one for each."""
        if names in self._known:
            return names
        if len(self._known) >= self._most:
            return (OTHERS,) * len(names)
        self._known.add(names)
        return names
