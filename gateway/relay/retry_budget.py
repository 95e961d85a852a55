"""How many retries a gateway may add to the load. Pure: the clock is passed in.

Each retry is one more request to replicas that may fail because they have too much to do. So retries are bounded by a
share of the requests, as in Envoy's and Finagle's retry budgets, and a few are always allowed.
"""

from __future__ import annotations

from gateway.routing.recent import Recent
from gateway.settings.limit_settings import RetrySettings

WINDOW_S = 10.0


class RetryBudget:
    """Of the last 10 s: retries are at most `budget_min_retries`, or `budget_percent` of the requests."""

    def __init__(self, settings: RetrySettings) -> None:
        self._min_retries = settings.budget_min_retries
        self._share = settings.budget_percent / 100
        self._requests = Recent(WINDOW_S)
        self._retries = Recent(WINDOW_S)

    def note_request(self, now_s: float) -> None:
        """A client's request has come."""
        self._requests.add(now_s)

    def take(self, now_s: float) -> bool:
        """Whether one more retry is within the budget; it is then counted."""
        allowed = max(self._min_retries, self._share * self._requests.total(now_s))
        if self._retries.total(now_s) >= allowed:
            return False
        self._retries.add(now_s)
        return True
