"""Where a request stands in the queue: the band and the weight of its tenant, and what its answer most likely takes."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.scripts import Standing
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.queue_settings import TenantSettings

NOBODY = "-"
"""The tenant of all callers if no API keys are configured."""
_ASSUMED_OUTPUT_TOKENS = 200.0
_NEWEST = 0.1
"""The part of the newest answer in the mean."""
_MAX_TENANTS = 10_000


class Tenants:
    """What is known of all tenants. Learns how long their answers are."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._queue = settings.queue
        self._bands = {band.name: (rank, band.room_share) for rank, band in enumerate(settings.queue.bands)}
        self._tenants = {tenant.name: tenant for tenant in settings.tenants}
        self._output_tokens: dict[str, float] = {}

    def of(self, tenant: str | None, since_ms: int = 0) -> tuple[float, Standing]:
        """The part of a replica's room that a tenant's request may use, and its standing."""
        name = tenant or NOBODY
        known = self._tenants.get(name) or TenantSettings(name=name)
        rank, room_share = self._bands[known.priority or self._queue.default_band]
        output_tokens = self._output_tokens.get(name, _ASSUMED_OUTPUT_TOKENS)
        standing = Standing(
            band=rank,
            tenant=name,
            weight=known.weight,
            output_tokens=round(self._queue.output_weight * output_tokens),
            since_ms=since_ms,
            wait_ms=int(self._queue.wait_s * 1000),
            starve_ms=int(self._queue.starve_s * 1000),
        )
        return room_share, standing

    def used_tokens(self, tenant: str | None, uncached_tokens: int, output_tokens: int) -> int:
        """What a tenant is charged for an answer."""
        name = tenant or NOBODY
        if len(self._output_tokens) >= _MAX_TENANTS:
            self._output_tokens.clear()
        mean = self._output_tokens.get(name, _ASSUMED_OUTPUT_TOKENS)
        self._output_tokens[name] = mean + _NEWEST * (output_tokens - mean)
        return max(0, uncached_tokens) + round(self._queue.output_weight * output_tokens)

    def bands(self) -> Sequence[str]:
        """The names of the bands; the first one goes first."""
        return list(self._bands)
