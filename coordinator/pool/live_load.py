"""The load of one gateway's own requests. No I/O.

The store knows the load of all gateways. A gateway needs its own while the store is away.
"""

from __future__ import annotations

from collections.abc import Callable

from coordinator.placement import Reservation, Used


class LiveLoad:
    """Sums over the live reservations of one gateway in one pool. Replicas and accounts without any are not listed."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        """By replica."""
        self.backlog_tokens: dict[str, int] = {}
        """By replica."""
        self.of_account: dict[str, int] = {}
        """Requests, by the account that has limits."""
        self.waiting = 0
        """The requests that are queued for room in this gateway alone, because the store is away."""
        self.on_freed: Callable[[str, Used | None], None] = lambda _reservation, _used: None
        """Called when a reservation is over, with what it took; and when its prefill is, while it is still live."""

    def __repr__(self) -> str:
        return f"<LiveLoad {self.requests}>"

    def add(self, one: Reservation) -> None:
        """Count a reservation."""
        self._change(one, 1)
        _add(self.backlog_tokens, one.replica, one.backlog_tokens)

    def remove(self, one: Reservation) -> None:
        """Count it no more."""
        self._change(one, -1)
        self.end_backlog(one)

    def end_backlog(self, one: Reservation) -> None:
        """Its prompt is computed. Its own backlog_tokens are those that are counted."""
        _add(self.backlog_tokens, one.replica, -one.backlog_tokens)

    def _change(self, one: Reservation, by: int) -> None:
        _add(self.requests, one.replica, by)
        for limits in one.budget.accounts if one.budget else ():
            _add(self.of_account, limits.account, by)


def _add(sums: dict[str, int], name: str, by: int) -> None:
    total = sums.get(name, 0) + by
    if total:
        sums[name] = total
    else:
        sums.pop(name, None)
