"""What operators see and do by HTTP: the replicas and their drain, the demand, and who waits in the queue."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from coordinator.errors import StoreError
from coordinator.pool.demand import Demand, read_demand, sum_of
from coordinator.pool.draining import drain
from coordinator.pool.pool import Pool
from coordinator.pool.queue_view import read_queue
from coordinator.pool.tenant_use import TenantUse, read_use
from coordinator.registry import ReplicaRecord, each, is_number, readable
from coordinator.store import Store
from gateway.errors import ApiError
from gateway.replicas.discovery.added import ADDED
from gateway.replicas.discovery.discovery import Discovery
from gateway.replicas.fleet import Fleet
from gateway.replicas.member import Member
from gateway.routing.tenants import bands_of
from gateway.settings.gateway_settings import GatewaySettings
from gateway.settings.queue_settings import NO_LIMITS, TenantSettings

_MOST_TENANTS = 200


class Operations:
    """Answers the operators' paths."""

    def __init__(self, settings: GatewaySettings, fleet: Fleet, store: Store, discovery: Discovery) -> None:
        self._fleet = fleet
        self._store = store
        self._discovery = discovery
        self.use(settings)

    def use(self, settings: GatewaySettings) -> None:
        """These are the gateway's settings from now on."""
        self._slots = settings.policy.max_active_requests or 0
        self._queue = settings.queue
        self._shares = [share for _, share in bands_of(settings).values()]
        self._tenants = settings.tenants

    # -- replicas ------------------------------------------------------------------------------------------------

    async def replicas(self) -> list[dict[str, Any]]:
        """Every replica that gets requests from this gateway, by name. Raises ApiError."""
        names: dict[str, list[str]] = {}
        for member in self._fleet.targets:
            if member.pool and not member.identity.is_taken:
                names.setdefault(member.pool, []).append(member.id)
        found = [await self._look(self._store.pool(pool), members) for pool, members in names.items()]
        return sorted((each for pool in found for each in pool), key=lambda each: str(each["id"]))

    async def replica(self, name: str) -> dict[str, Any]:
        """One replica: its state and what it has. Raises ApiError."""
        [found] = await self._look(self._pool_of(name), [name])
        return found

    async def _look(self, pool: Pool, names: list[str]) -> list[dict[str, Any]]:
        """Replicas of one pool, as Redis knows them now."""
        hashes = pool.keys.replicas, pool.keys.active, pool.keys.draining
        try:
            records, active, drained = await asyncio.gather(*(pool.read("HMGET", key, *names) for key in hashes))
            keys = await asyncio.gather(*(pool.read("ZCARD", pool.keys.held(name)) for name in names))
        except StoreError as error:
            raise store_away(error) from None
        texts = ([readable(text or b"") for text in part] for part in (records, active, drained))
        rows = zip(names, *texts, keys, strict=True)
        return [_shown_replica(pool.name, *row) | self._told(self._fleet.members[row[0]]) for row in rows]

    def _told(self, member: Member) -> dict[str, Any]:
        """What its source tells of a replica. A replica that was removed has no source."""
        source = self._discovery.sources.get(member.id)
        return {"url": member.url, "source": source, "labels": member.labels_in_force}

    def unused(self) -> list[dict[str, Any]]:
        """The replicas that get no requests: those that were never reached, and added ones that others go before."""
        found = [
            {"id": member.id, **self._told(member), "problem": member.problem or "its id belongs to another engine"}
            for member in self._fleet.targets
            if not member.pool or member.identity.is_taken
        ]
        for replica, why in self._discovery.outranked.get(ADDED, {}).values():
            told = {"id": replica.id, "url": replica.url, "source": ADDED, "labels": replica.labels}
            found.append(told | {"problem": why})
        return found

    async def drain(self, name: str, *, is_over: bool, moves: bool = False) -> dict[str, Any]:
        """Drain a replica, or end that. With `moves`, its requests go on elsewhere if they can. Raises ApiError."""
        pool = self._pool_of(name)
        try:
            drained = await drain(pool.run, name, is_over=is_over, moves=moves)
        except StoreError as error:
            raise store_away(error) from None
        if not drained.state:
            raise _unknown(name)
        return {"id": name, "pool": pool.name, "state": drained.state, "active_requests": drained.active}

    def _pool_of(self, name: str) -> Pool:
        member = self._fleet.members.get(name)
        if member is None or not member.pool or member.identity.is_taken:
            raise _unknown(name)
        return self._store.pool(member.pool)

    # -- demand --------------------------------------------------------------------------------------------------

    async def demand(self, model: str | None) -> dict[str, Any]:
        """The demand of the pool that serves a model, the sum if several pools serve it, or that of all pools by name.
        Raises ApiError."""
        if model is None:
            names = sorted(self._store.pool_names())
            return {"pools": {name: self.shown(await self._read(self._store.pool(name))) for name in names}}
        backends = self._fleet.backends(model)
        if not backends:
            raise ApiError(404, "model_not_found", "model: no replica serves it, and none has.", "model")
        names = sorted({backend.pool for backend in backends})
        demand = sum_of([await self._read(self._store.pool(name)) for name in names])
        return ({"pool": names[0]} if len(names) == 1 else {"pools": names}) | self.shown(demand)

    async def _read(self, pool: Pool) -> Demand:
        try:
            return await read_demand(pool.run, self._queue.prefill_tokens_per_s)
        except StoreError as error:
            raise store_away(error) from None

    def shown(self, demand: Demand) -> dict[str, Any]:
        """A demand as JSON. `slots` are the requests that the ready replicas may serve at once, null if unlimited."""
        return {
            "requests": demand.waiting_requests + demand.running_requests,
            "waiting_requests": demand.waiting_requests,
            "waiting_tokens": demand.waiting_tokens,
            "held_requests": demand.held_requests,
            "oldest_wait_s": round(demand.oldest_wait_s, 3),
            "running_requests": demand.running_requests,
            "running_tokens": demand.running_tokens,
            "slots": self._slots * demand.ready_replicas if self._slots else None,
            "prefill_tokens_per_s": demand.prefill_tokens_per_s,
            "work_s": None if demand.work_s is None else round(demand.work_s, 3),
            "ready_replicas": demand.ready_replicas,
            "draining_replicas": demand.draining_replicas,
        }

    # -- the queue -----------------------------------------------------------------------------------------------

    async def queue(self) -> dict[str, Any]:
        """Who waits in each pool, since when, and why. Raises ApiError."""
        queue, pools = self._queue, []
        bands = dict(enumerate(band.name for band in queue.bands))
        for name in sorted(self._store.pool_names()):
            pool = self._store.pool(name)
            demand = await self._read(pool)
            try:
                limits = self._slots, queue.max_wait_s, queue.prefill_tokens_per_s
                waiting, rooms = await read_queue(pool, *limits, self._shares)
            except StoreError as error:
                raise store_away(error) from None
            told = {"waiting_requests": demand.waiting_requests, "held_requests": demand.held_requests}
            lines = [asdict(one) | {"band": bands.get(one.band, str(one.band))} for one in waiting]
            pools.append({"pool": name, **told, "waiting": lines, "replicas": [asdict(room) for room in rooms]})
        return {"pools": pools}

    async def tenants(self) -> list[dict[str, Any]]:
        """The configured tenants, their limits, and what they use of these. Raises StoreError."""
        pools = [self._store.pool(name) for name in self._store.pool_names()]
        shown = self._tenants[:_MOST_TENANTS]
        use = await read_use(pools, [tenant.name for tenant in shown])
        return [_shown_tenant(tenant, use.get(tenant.name), self._queue.default_band) for tenant in shown]


def _shown_tenant(tenant: TenantSettings, use: TenantUse | None, band: str) -> dict[str, Any]:
    """Where there is no limit, the limit is null, and so is what is used of it."""
    limits = tenant.limits
    has_any = use is not None and limits != NO_LIMITS
    return {
        "name": tenant.name,
        "band": tenant.priority or band,
        "weight": tenant.weight,
        "concurrency": limits.concurrency,
        "active_requests": use.active_requests if use and has_any else None,
        "requests_per_min": limits.requests_per_min,
        "requests_used": use.used(use.requests_ms, limits.requests_per_min) if use else None,
        "tokens_per_min": limits.tokens_per_min,
        "tokens_used": use.used(use.tokens_ms, limits.tokens_per_min) if use else None,
    }


def _shown_replica(pool: str, name: str, text: str, active: str, drained: str, keys: int) -> dict[str, Any]:
    """One replica, from its records; what cannot be read in them counts as not there."""
    record = each([name.encode(), text.encode()], ReplicaRecord.parse).get(name)
    incarnation, _, since_ms = drained.partition(" ")
    is_drained = record is not None and record.incarnation == incarnation and is_number(since_ms)
    return {
        "id": name,
        "pool": pool,
        "state": record.state if record is not None else "unknown",
        "active_requests": int(active) if is_number(active) else 0,
        "keys": keys,
        "drained_since_ms": int(since_ms) if is_drained else None,
    }


def _unknown(name: str) -> ApiError:
    message = f"replica: {name[:100]!r} is none of those that this gateway uses; GET /v1/replicas lists them."
    return ApiError(404, "replica_not_found", message, "replica")


def records_secret_missing() -> ApiError:
    """The refusal when operators want to add something, and this gateway cannot sign it."""
    message = (
        "Keys that are made and replicas that are added are signed records in Redis, and this gateway has no secret to "
        "sign with. All gateways need: the same security.records_secret (KVGATE_RECORDS_SECRET, like the output of "
        "`openssl rand -hex 32`); a key with admin: true in security.api_keys; security.cache_salt_secret "
        "(KVGATE_CACHE_SALT_SECRET) or share_cache: true; and a restart: docs/how-to/rotate-a-key.md."
    )
    return ApiError(409, "records_secret_missing", message)


def store_away(error: StoreError) -> ApiError:
    """The refusal when what is asked for is in the store only."""
    message = f"Redis does not answer ({error}). Only Redis knows this. Try again soon."
    return ApiError(503, "store_unreachable", message, headers={"retry-after": "1"})
