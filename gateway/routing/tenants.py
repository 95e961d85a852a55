"""What a request's tenant and API key mean for it: band, weight and limits, and what its answer most likely takes."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.accounts import AccountLimits, Limits, account_of_key, account_of_tenant
from coordinator.placement import Standing, Used
from gateway.request.keyring import Caller
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.queue_settings import NO_LIMITS, AccountLimitSettings, TenantSettings

NOBODY = "-"
"""The tenant of all callers if no API keys are configured."""
OUTPUT_WEIGHT = 2
"""A token of an answer takes as much of a tenant's share as this many of a prompt: a GPU computes those of a prompt
together, and those of an answer one by one, but for many requests at once."""
_ASSUMED_OUTPUT_TOKENS = 200.0
_NEWEST = 0.1
"""The part of the newest answer in the average."""
_LONGER, _SHORTER = 1.495, 0.995
"""A step up is 99 times as large as one down, so one of a hundred answers is longer than the number that makes them."""
_MAX_TENANTS = 10_000
_LEAVES_ROOM, _FEW_SLOTS = 0.8, 5
"""The share of the room for a band that leaves some to those before it. Of fewer slots than these, it would leave much
more than a fifth: so the default band, which most requests have, leaves none."""


_UNLISTED = TenantSettings(name=NOBODY)
"""What tenants have that are not in the settings."""


class Tenants:
    """What is known of all tenants. Learns how long their answers are."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.use(settings)
        self._output_tokens: dict[str, float] = {}
        """Means, by tenant."""
        self._long_tokens: dict[str, float] = {}
        """The p99 of the lengths of answers, by tenant, as a number that steps towards it with each answer."""

    def use(self, settings: GatewaySettings) -> None:
        """Other weights, priorities and limits hold from now on. What is known of their answers stays."""
        self._queue = settings.queue
        self._wait_ms, self._starve_ms = int(self._queue.wait_s * 1000), int(self._queue.starve_s * 1000)
        bands = bands_of(settings)
        self._bands, self._room_shares = list(bands), [share for _, share in bands.values()]
        self._ranks = {band: rank for band, (rank, _) in bands.items()}
        self._default_rank = self._ranks[self._queue.default_band]
        self._tenants = {tenant.name: tenant for tenant in settings.tenants}
        self._keys = {key.name: key.limits for key in settings.security.api_keys}

    def of(
        self, tenant: str | None, max_output_tokens: int | None, since_ms: int = 0, priority: int | None = None
    ) -> tuple[float, Standing]:
        """The part of a replica's room that a tenant's request may use, and its standing. Its answer has no more tokens
        than `max_output_tokens`. Its InferenceObjective gives it this `priority`."""
        name = tenant or NOBODY
        known, band = self._tenants.get(name, _UNLISTED), self.band(tenant, priority)
        output_tokens = self._output_tokens.get(name, _ASSUMED_OUTPUT_TOKENS)
        if max_output_tokens is not None and max_output_tokens < output_tokens:
            output_tokens = max_output_tokens
        charge_tokens = round(OUTPUT_WEIGHT * output_tokens)
        standing = Standing(band, name, known.weight, charge_tokens, since_ms, self._wait_ms, self._starve_ms)
        return self._room_shares[band], standing

    def limits_of(
        self,
        caller: Caller,
        max_output_tokens: int | None,
        can_wait: bool,
        most_tokens: int = 0,
        prompt_tokens: int = 0,
    ) -> Limits | None:
        """The limits of a caller's tenant and API key, for a request whose answer has no more tokens than
        `max_output_tokens`; None if there are none. The engine computes no more than `most_tokens` for it, its prompt
        included; 0: not known. A request that cannot wait counts, but is never kept waiting."""
        tenant, accounts = caller.tenant or NOBODY, []
        of_tenant = self._tenants.get(tenant, _UNLISTED).limits
        # Those of a configured key may have changed since the caller was identified.
        of_key = caller.limits if caller.is_recorded else self._keys.get(caller.id, caller.limits)
        if of_tenant != NO_LIMITS:
            accounts.append(_account(account_of_tenant(tenant), of_tenant, can_wait))
        if of_key != NO_LIMITS:
            accounts.append(_account(account_of_key(caller.account), of_key, can_wait))
        if not accounts:
            return None
        tokens = max_output_tokens
        if tokens is None:
            tokens = self.long_answer_tokens(tenant)
        if most_tokens:
            tokens = min(tokens, max(0, most_tokens - prompt_tokens))
        if not can_wait and max_output_tokens is None:  # its prompt is not read
            tokens = 0
        return Limits(tuple(accounts), tokens, most_tokens)

    def long_answer_tokens(self, tenant: str | None) -> int:
        """One of a hundred answers of a tenant has more tokens."""
        return round(self._long_tokens.get(tenant or NOBODY, _ASSUMED_OUTPUT_TOKENS))

    def used(self, tenant: str | None, uncached_tokens: int, output_tokens: int) -> Used:
        """What a tenant's answer took."""
        name = tenant or NOBODY
        if len(self._output_tokens) >= _MAX_TENANTS:
            self._output_tokens.clear()
            self._long_tokens.clear()
        if output_tokens:  # embeddings tell nothing of how long answers are
            mean = self._output_tokens.get(name, _ASSUMED_OUTPUT_TOKENS)
            self._output_tokens[name] = mean + _NEWEST * (output_tokens - mean)
            long = self._long_tokens.get(name, _ASSUMED_OUTPUT_TOKENS)
            is_longer = output_tokens > long
            self._long_tokens[name] = min(output_tokens, _LONGER * long) if is_longer else max(1.0, _SHORTER * long)
        return self.used_so_far(uncached_tokens, output_tokens)

    def used_so_far(self, uncached_tokens: int, output_tokens: int) -> Used:
        """What a part of an answer took."""
        uncached_tokens = max(0, uncached_tokens)
        charge_tokens = uncached_tokens + round(OUTPUT_WEIGHT * output_tokens)
        return Used(charge_tokens, uncached_tokens + output_tokens)

    def engine_priority(self, tenant: str | None, priority: int | None) -> int | None:
        """vLLM's `priority` of a tenant's request: 0 for the default band, less for those that go before it. None if
        engines are not told."""
        return self.band(tenant, priority) - self._default_rank if self._queue.engine_priority else None

    def band(self, tenant: str | None, priority: int | None) -> int:
        """The band of a tenant's request, whose InferenceObjective gives it this priority; 0 goes first. Each step of
        the priority is a band. No request goes before the band that its tenant was given."""
        given = self._tenants.get(tenant or NOBODY, _UNLISTED).priority
        own = self._ranks[given] if given is not None else None
        if priority is None:
            return self._default_rank if own is None else own
        wanted = min(max(self._default_rank - priority, 0), len(self._bands) - 1)
        return wanted if own is None else max(wanted, own)

    def bands(self) -> Sequence[str]:
        """The names of the bands; the first one goes first."""
        return self._bands


def _account(account: str, limits: AccountLimitSettings, can_wait: bool) -> AccountLimits:
    concurrency = limits.concurrency or 0 if can_wait else 0
    return AccountLimits(account, concurrency, limits.requests_per_min or 0, limits.tokens_per_min or 0)


def bands_of(settings: GatewaySettings) -> dict[str, tuple[int, float]]:
    """The rank of each band by name, and the part of the room that it may use. If this is not configured, a band leaves
    room to those before it, if anybody has one of these: a tenant, or everybody else (`default_band`)."""
    default, slots = settings.queue.default_band, settings.policy.max_active_requests
    used = {default, *(tenant.priority for tenant in settings.tenants)}
    bands, is_first = {}, True
    for rank, band in enumerate(settings.queue.bands):
        has_few = band.name == default and slots is not None and slots < _FEW_SLOTS
        bands[band.name] = rank, band.room_share or (1.0 if is_first or has_few else _LEAVES_ROOM)
        is_first = is_first and band.name not in used
    return bands
