"""Limits of tenants as one gateway keeps them by itself, while the store is away. Pure: the clock is passed in.

Each gateway gives a tenant its share of a limit, and at least one request. Requests and tokens of a minute are leaky
buckets as in coordinator/lua/lib/limits.lua. They are never less full than those of the store were when it told last.
"""

from __future__ import annotations

import math

from coordinator.errors import OverLimit
from coordinator.placement import TenantLimits, Used

_MINUTE_MS, _ROUNDING_MS = 60_000.0, 0.5
TOLD_MS = 3000.0
"""How long it counts what the store told of requests in flight elsewhere: as long as a gateway's lease."""
_KINDS = ("requests", "tokens")


def local_concurrency(concurrency: int, gateways: int) -> int:
    """How many requests of a tenant one gateway may have in flight; 0: any number."""
    return max(1, concurrency // gateways) if concurrency else 0


class LocalBuckets:
    """What tenants have used of the last minute."""

    def __init__(self) -> None:
        self._empty_at_ms: dict[tuple[str, str], float] = {}
        self._reserved: dict[str, tuple[str, int, float]] = {}
        """Reservation -> tenant, tokens, tokens per minute."""
        self._elsewhere: dict[str, tuple[int, float]] = {}
        """Tenant -> its requests in flight at other gateways, and until when this counts."""

    def __repr__(self) -> str:
        return f"<LocalBuckets {len(self._empty_at_ms)} used, {len(self._reserved)} reserved>"

    def let_in(self, tenant: str, limits: TenantLimits, gateways: int, now_ms: float) -> None:
        """Count a new request. Raises OverLimit if a bucket is full."""
        rates = _rates(limits, gateways)
        for kind, per_min in zip(_KINDS, rates, strict=True):
            if per_min:
                amount_ms = _MINUTE_MS / per_min if kind == "requests" else 1.0
                over_ms = self._empty_at(kind, tenant, now_ms) + amount_ms - now_ms - _MINUTE_MS
                if over_ms > _ROUNDING_MS:
                    raise OverLimit(kind, math.ceil(over_ms) / 1000, self._left(tenant, rates, now_ms))
        self._pour("requests", tenant, 1, rates[0], now_ms)

    def reserve(
        self, reservation: str, tenant: str, tokens: int, limits: TenantLimits, gateways: int, now_ms: float
    ) -> None:
        """Count the most tokens that an attempt can take."""
        per_min = _rates(limits, gateways)[1]
        if per_min:
            self._pour("tokens", tenant, tokens, per_min, now_ms)
            self._reserved[reservation] = tenant, tokens, per_min

    def finish(self, reservation: str, used: Used | None, now_ms: float) -> None:
        """An attempt is over: correct its tokens, if it is known how many it took."""
        tenant, tokens, per_min = self._reserved.pop(reservation, ("", 0, 0.0))
        if tenant and used is not None:
            self._pour("tokens", tenant, used.limit_tokens - tokens, per_min, now_ms)

    def told(self, tenant: str, left: tuple[int, ...], own_active: int, now_ms: float) -> None:
        """The store told what is left of a tenant's limits (as in Placement), while this gateway had so many of its
        requests in flight."""
        for kind, ms in zip(_KINDS, left[1:4:2], strict=True):
            if ms > 0:
                self._empty_at_ms[kind, tenant] = max(self._empty_at(kind, tenant, now_ms), now_ms + ms)
        if len(left) > 4:
            self._elsewhere[tenant] = max(0, left[4] - own_active), now_ms + TOLD_MS

    def elsewhere(self, tenant: str, now_ms: float) -> int:
        """The requests that a tenant most likely has in flight at other gateways, if the store told lately."""
        active, until_ms = self._elsewhere.get(tenant, (0, 0.0))
        return active if now_ms < until_ms else 0

    def _empty_at(self, kind: str, tenant: str, now_ms: float) -> float:
        return max(now_ms, self._empty_at_ms.get((kind, tenant), now_ms))

    def _pour(self, kind: str, tenant: str, amount: int, per_min: float, now_ms: float) -> None:
        if per_min and amount:
            self._empty_at_ms[kind, tenant] = self._empty_at(kind, tenant, now_ms) + amount * _MINUTE_MS / per_min

    def _left(self, tenant: str, rates: tuple[float, float], now_ms: float) -> tuple[int, ...]:
        """As in Placement."""
        left: list[int] = []
        for kind, per_min in zip(_KINDS, rates, strict=True):
            ms = self._empty_at(kind, tenant, now_ms) - now_ms
            free = math.floor((_MINUTE_MS - ms + _ROUNDING_MS) * per_min / _MINUTE_MS)
            left += [min(int(per_min), max(0, free)) if per_min else -1, math.ceil(ms)]
        return tuple(left)


def _rates(limits: TenantLimits, gateways: int) -> tuple[float, float]:
    """The requests and tokens that a tenant may have a minute at one gateway; 0: any number."""
    requests, tokens = limits.requests_per_min, limits.tokens_per_min
    return max(1.0, requests / gateways) if requests else 0.0, max(1.0, tokens / gateways) if tokens else 0.0
