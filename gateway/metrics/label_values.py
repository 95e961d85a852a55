"""Bounds the values of labels, because each one is a series of its own in Prometheus."""

from __future__ import annotations

_MOST = 100
MOST_PAIRS = 200
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


class LabelPairs:
    """Pairs of a model and a tenant: the labels of one metric. When there are 200, all others share one pair, so that
    many models of many tenants do not multiply."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def of(self, model: str, tenant: str) -> tuple[str, str]:
        """The values for a model and a tenant."""
        pair = model, tenant
        if pair in self._known:
            return pair
        if len(self._known) >= MOST_PAIRS:
            return OTHERS, OTHERS
        self._known.add(pair)
        return pair
