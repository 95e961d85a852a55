"""Bounds the values of a label, because each one is a series of its own in Prometheus."""

from __future__ import annotations

_MOST = 100
OTHERS = "others"


class LabelValues:
    """The values that come first keep their names; when there are 100, all others share one."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        """The value for a name."""
        if name in self._known:
            return name
        if len(self._known) >= _MOST:
            return OTHERS
        self._known.add(name)
        return name
