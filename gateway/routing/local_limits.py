"""Limits of tenants as one gateway keeps them by itself, while the store is away. Pure: the clock is passed in.

Each gateway gives a tenant its share of a limit, and at least one request. Requests and tokens of a minute are leaky
buckets as in coordinator/lua/lib/limits.lua, which begin empty: what was used before is not known here.
"""

from __future__ import annotations

import math

from coordinator.errors import OverLimit
from coordinator.scripts import TenantLimits, Used

_MINUTE_MS, _LONGEST_DEBT_MS, _ROUNDING_MS = 60_000.0, 600_000.0, 0.5
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
        """Count the tokens that an attempt most likely takes."""
        per_min = _rates(limits, gateways)[1]
        if per_min:
            # What ends gives back as many as it took, so a huge estimate counts as no more than the bucket takes.
            room_ms = now_ms + _LONGEST_DEBT_MS - self._empty_at("tokens", tenant, now_ms)
            tokens = min(tokens, int(room_ms * per_min / _MINUTE_MS))
            self._pour("tokens", tenant, tokens, per_min, now_ms)
            self._reserved[reservation] = tenant, tokens, per_min

    def finish(self, reservation: str, used: Used | None, now_ms: float) -> None:
        """An attempt is over: correct its tokens, if it is known how many it took."""
        tenant, tokens, per_min = self._reserved.pop(reservation, ("", 0, 0.0))
        if tenant and used is not None:
            self._pour("tokens", tenant, used.limit_tokens - tokens, per_min, now_ms)

    def forget(self) -> None:
        """The store counts again."""
        self._empty_at_ms.clear()
        self._reserved.clear()

    def _empty_at(self, kind: str, tenant: str, now_ms: float) -> float:
        return max(now_ms, self._empty_at_ms.get((kind, tenant), now_ms))

    def _pour(self, kind: str, tenant: str, amount: int, per_min: float, now_ms: float) -> None:
        if per_min and amount:
            at_ms = self._empty_at(kind, tenant, now_ms) + amount * _MINUTE_MS / per_min
            self._empty_at_ms[kind, tenant] = min(at_ms, now_ms + _LONGEST_DEBT_MS)

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
