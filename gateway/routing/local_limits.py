"""Limits of accounts as one gateway keeps them by itself, while the store is away. Pure: the clock is passed in.

Each gateway gives an account its share of a limit, and at least one request. Requests and tokens of a minute are leaky
buckets as in coordinator/lua/lib/limits.lua. They are never less full than those of the store were when it told last.
"""

from __future__ import annotations

import math

from coordinator.accounts import AccountLimits, Left, Limits
from coordinator.errors import OverLimit
from coordinator.placement import Used

_MINUTE_MS, _ROUNDING_MS = 60_000.0, 0.5
TOLD_MS = 3000.0
"""How long it counts what the store told of requests in flight elsewhere: as long as a gateway's lease."""
_KINDS = ("requests", "tokens")
_UNSEEN_SHARE = 100
"""Of a budget of which it knows nothing, a gateway may spend one part of so many. It may be used up."""


def local_concurrency(concurrency: int, gateways: int) -> int:
    """How many requests of an account one gateway may have in flight; 0: any number."""
    return max(1, concurrency // gateways) if concurrency else 0


def local_budget(limit: int, seen: int | None, gateways: int) -> int:
    """What one gateway may spend of a budget by itself. `seen` is what all had spent when the store told last; None: it
    has never told this process."""
    return limit // _UNSEEN_SHARE if seen is None else max(0, limit - seen) // gateways


class LocalBuckets:
    """What accounts have used of the last minute."""

    def __init__(self) -> None:
        self._empty_at_ms: dict[tuple[str, str], float] = {}
        self._reserved: dict[str, tuple[int, list[tuple[str, float]]]] = {}
        """Reservation -> tokens, and the accounts with their tokens per minute."""
        self._elsewhere: dict[str, tuple[int, float]] = {}
        """Account -> its requests in flight at other gateways, and until when this counts."""

    def __repr__(self) -> str:
        return f"<LocalBuckets {len(self._empty_at_ms)} used, {len(self._reserved)} reserved>"

    def let_in(self, limits: Limits, gateways: int, now_ms: float) -> None:
        """Count a new request. Raises OverLimit if a bucket of any of its accounts is full: that which is so for
        longest."""
        rates = [_rates(each, gateways) for each in limits.accounts]
        longest_ms, which, at = _ROUNDING_MS, "", 0
        for number, (each, per_mins) in enumerate(zip(limits.accounts, rates, strict=True)):
            for kind, per_min in zip(_KINDS, per_mins, strict=True):
                if per_min:
                    amount_ms = _MINUTE_MS / per_min if kind == "requests" else 1.0
                    over_ms = self._empty_at(kind, each.account, now_ms) + amount_ms - now_ms - _MINUTE_MS
                    if over_ms > longest_ms:
                        longest_ms, which, at = over_ms, kind, number
        if which:
            left = tuple(
                self._left(one.account, rate, now_ms) for one, rate in zip(limits.accounts, rates, strict=True)
            )
            raise OverLimit(which, math.ceil(longest_ms) / 1000, left, at)
        for each, (requests_per_min, _) in zip(limits.accounts, rates, strict=True):
            self._pour("requests", each.account, 1, requests_per_min, now_ms)

    def reserve(self, reservation: str, tokens: int, limits: Limits, gateways: int, now_ms: float) -> None:
        """Count the most tokens that an attempt can take."""
        rates = [(each.account, _rates(each, gateways)[1]) for each in limits.accounts if each.tokens_per_min]
        for account, per_min in rates:
            self._pour("tokens", account, tokens, per_min, now_ms)
        if rates:
            self._reserved[reservation] = tokens, rates

    def finish(self, reservation: str, used: Used | None, now_ms: float) -> None:
        """An attempt is over: correct its tokens, if it is known how many it took."""
        tokens, rates = self._reserved.pop(reservation, (0, []))
        for account, per_min in rates if used is not None else ():
            assert used is not None
            self._pour("tokens", account, used.limit_tokens - tokens, per_min, now_ms)

    def told(self, account: str, left: Left, own_active: int, now_ms: float) -> None:
        """The store told what is left of an account's limits, while this gateway had so many of its requests in
        flight."""
        for kind, ms in zip(_KINDS, (left.requests_ms, left.tokens_ms), strict=True):
            if ms > 0:
                self._empty_at_ms[kind, account] = max(self._empty_at(kind, account, now_ms), now_ms + ms)
        if left.active is not None:
            self._elsewhere[account] = max(0, left.active - own_active), now_ms + TOLD_MS

    def elsewhere(self, account: str, now_ms: float) -> int:
        """The requests that an account most likely has in flight at other gateways, if the store told lately."""
        active, until_ms = self._elsewhere.get(account, (0, 0.0))
        return active if now_ms < until_ms else 0

    def _empty_at(self, kind: str, account: str, now_ms: float) -> float:
        return max(now_ms, self._empty_at_ms.get((kind, account), now_ms))

    def _pour(self, kind: str, account: str, amount: int, per_min: float, now_ms: float) -> None:
        if per_min and amount:
            self._empty_at_ms[kind, account] = self._empty_at(kind, account, now_ms) + amount * _MINUTE_MS / per_min

    def _left(self, account: str, rates: tuple[float, float], now_ms: float) -> Left:
        left: list[int] = []
        for kind, per_min in zip(_KINDS, rates, strict=True):
            ms = self._empty_at(kind, account, now_ms) - now_ms
            free = math.floor((_MINUTE_MS - ms + _ROUNDING_MS) * per_min / _MINUTE_MS)
            left += [min(int(per_min), max(0, free)) if per_min else -1, math.ceil(ms)]
        return Left(*left)


def _rates(limits: AccountLimits, gateways: int) -> tuple[float, float]:
    """The requests and tokens that an account may have a minute at one gateway; 0: any number."""
    requests, tokens = limits.requests_per_min, limits.tokens_per_min
    return max(1.0, requests / gateways) if requests else 0.0, max(1.0, tokens / gateways) if tokens else 0.0
