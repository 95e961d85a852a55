"""Limits the retries that a gateway adds to the load. Pure: the clock is passed in.

A retry is one more request to replicas that may fail because they are overloaded. So retries are limited to a share of
the requests, as in Envoy's and Finagle's retry budgets. A few are always allowed.
"""

from __future__ import annotations

from gateway.routing.sliding_count import SlidingCount

WINDOW_S = 10.0
MIN_RETRIES = 10
"""Always allowed: they add little load, and a gateway with few requests needs them."""
SHARE = 0.1
"""Of the requests: retries make an overload worse by a tenth at most. Envoy and Finagle allow twice as many."""


class RetryBudget:
    """Within 10 s, allows MIN_RETRIES retries, or a SHARE of the requests if that is more."""

    def __init__(self) -> None:
        self._requests = SlidingCount(WINDOW_S)
        self._retries = SlidingCount(WINDOW_S)

    def note_request(self, now_s: float) -> None:
        """Counts a client's request."""
        self._requests.add(now_s)

    def take(self, now_s: float, may_exceed: bool = False) -> bool:
        """Whether one more retry is within the budget, or may exceed it. If so, it is counted."""
        allowed = max(MIN_RETRIES, SHARE * self._requests.total(now_s))
        if self._retries.total(now_s) >= allowed and not may_exceed:
            return False
        self._retries.add(now_s)
        return True
