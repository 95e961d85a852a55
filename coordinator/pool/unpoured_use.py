"""What requests that a gateway let in by itself took of their accounts' limits, until the store has counted it. No I/O.

A request that the store placed before it went away is told under its reservation. So is one whose placement was sent,
and came too late: the store may have counted it, and counts it once. Requests for which nothing was sent are summed up
for each account, as buckets that leak: what was used long ago, while the store was away, is free again.
"""

from __future__ import annotations

import time
from collections.abc import Container

from coordinator.accounts import AccountLimits, Budget
from coordinator.placement import Used

_MINUTE_MS = 60_000.0


class UnpouredUse:
    """Of one gateway in one pool."""

    def __init__(self) -> None:
        self._of_requests: dict[str, Budget] = {}
        """By reservation: those that the store may know."""
        self._empty_at_ms: dict[tuple[str, str, int], float] = {}
        """Account, kind and limit of a minute -> when this bucket is empty."""
        self.lost: set[str] = set()
        """Reservations whose placement was unanswered when the last connection was lost."""

    def __repr__(self) -> str:
        return f"<UnpouredUse {len(self._of_requests)} requests, {len(self._empty_at_ms)} buckets>"

    def add(self, reservation: str, budget: Budget, used: Used | None, may_be_known: bool) -> None:
        """A request is over. `used` is what it took, if its answer has told."""
        if used is not None:
            budget = budget._replace(tokens=used.limit_tokens)
        if may_be_known or reservation in self.lost:
            self._of_requests[reservation] = budget
        else:
            self._pour(budget, time.monotonic() * 1000)

    def _pour(self, budget: Budget, now_ms: float) -> None:
        for limits in budget.accounts:
            for kind, amount, per_min in (
                ("tokens", budget.tokens, limits.tokens_per_min),
                ("requests", budget.requests, limits.requests_per_min),
            ):
                if amount and per_min:
                    bucket = limits.account, kind, per_min
                    at_ms = max(now_ms, self._empty_at_ms.get(bucket, now_ms))
                    self._empty_at_ms[bucket] = at_ms + amount * _MINUTE_MS / per_min

    def was_counted(self, reservation: str) -> None:
        """The store has counted this request, and was given its tokens back."""
        if (budget := self._of_requests.get(reservation)) is not None:
            self._of_requests[reservation] = budget._replace(requests=0)

    def waits_for(self, reservation: str) -> bool:
        """Whether `take` tells of this request when its placement is answered."""
        return reservation in self._of_requests

    def take(self, unanswered: Container[str]) -> list[str]:
        """Everything, as `reassert` takes it, but for requests whose placement is under way."""
        now_ms = time.monotonic() * 1000
        of_requests, self._of_requests = self._of_requests, {}
        told = []
        for reservation, budget in of_requests.items():
            if reservation in unanswered:
                self._of_requests[reservation] = budget
            else:
                told.append(f"{reservation} {budget.text}")
        for (account, kind, per_min), at_ms in self._empty_at_ms.items():
            amount = max(0.0, at_ms - now_ms) * per_min / _MINUTE_MS
            if kind == "tokens":
                budget = Budget((AccountLimits(account, tokens_per_min=per_min),), round(amount), 0)
            else:
                budget = Budget((AccountLimits(account, requests_per_min=per_min),), 0, amount)
            told.append(f"- {budget.text}")
        self._empty_at_ms.clear()
        return told
