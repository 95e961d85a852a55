"""Collects the evidence. It asks everything at once, each with its own timeout, and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import httpx

from coordinator.engine.sockets import tls_context
from coordinator.errors import StoreError
from coordinator.redis.checks import RedisEvidence
from coordinator.survey import PoolSnapshot, Survey
from gateway.doctor.ask import ask_gateway, ask_lmcache, ask_replica, with_keys
from gateway.doctor.evidence import Evidence, GatewayEvidence, PoolEvidence, ReplicaEvidence, Unknown
from gateway.settings.gateway_settings import GatewaySettings, ReplicaSettings
from gateway.tls import Certificate, contexts_of
from gateway.upstream import Upstream

_MORE_SNAPSHOTS = 4
_BETWEEN_SNAPSHOTS_S = 1.0
_Evidence = TypeVar("_Evidence")


@dataclass(frozen=True, slots=True)
class Targets:
    """The servers to ask."""

    redis_url: str
    namespace: str = ""
    gateways: tuple[str, ...] = ()
    itself: GatewayEvidence | None = None
    """The gateway that looks, if one does: it need not be asked."""
    replicas: tuple[ReplicaSettings, ...] | None = None
    """The configured replicas. None if no configuration is known: then only those in Redis are asked."""
    discovers: bool = False
    """Whether the gateways find replicas in other ways, too."""
    asks_registered: bool = True
    """Whether replicas that only Redis names are asked, too."""
    lmcache: tuple[str, ...] = ()
    replica_key: str | None = None
    replica_certificate: Certificate | None = None
    """What replicas see of the doctor."""
    api_key: str | None = None
    timeout_s: float = 2.0
    settings: GatewaySettings | Unknown | None = None
    """The configuration, if there is a file."""


async def gather(targets: Targets) -> Evidence:
    """Everything that can be learned about a cluster. Raises nothing if something does not answer."""
    timeout_s = targets.timeout_s
    survey = await _open(targets)
    tls = contexts_of(targets.replica_certificate)
    upstream = Upstream(timeout_s, targets.replica_key, tls)
    configured = tuple(ReplicaEvidence(one.id, one.url) for one in targets.replicas or ())
    try:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=tls_context()) as http:
            redis = await _redis(survey)  # alone, because it measures how long an answer takes
            gateways, lmcache, replicas = await asyncio.gather(
                _each(ask_gateway(http, url, timeout_s) for url in targets.gateways),
                _each(ask_lmcache(http, url, timeout_s) for url in targets.lmcache),
                _each(ask_replica(upstream, replica, True, timeout_s) for replica in configured),
            )
            lasting = None if targets.discovers or not configured else {replica.id for replica in configured}
            pools = await _pools_in_redis(survey, await _pools(survey, gateways, replicas), lasting)
            pools, others = await asyncio.gather(
                _with_more_snapshots(survey, pools),
                _each(
                    ask_replica(upstream, replica, False, timeout_s)
                    for replica in (_unasked(pools, configured) if targets.asks_registered else ())
                ),
            )
            replicas += others
            gateways = await with_keys(http, gateways, _model(replicas), targets.api_key, timeout_s)
            gateways = gateways if targets.itself is None else (targets.itself, *gateways)
    finally:
        await upstream.close()
        if isinstance(survey, Survey):
            await survey.close()
    return Evidence(redis, *_by_pool(pools, replicas), gateways, lmcache, targets.settings)


async def _each(asked: Iterable[Awaitable[_Evidence]]) -> tuple[_Evidence, ...]:
    return tuple(await asyncio.gather(*asked))


async def _open(targets: Targets) -> Survey | Unknown:
    try:
        return await Survey.open(targets.redis_url, targets.timeout_s, targets.namespace)
    except StoreError as error:
        return Unknown(str(error))


async def _redis(survey: Survey | Unknown) -> RedisEvidence | Unknown:
    if isinstance(survey, Unknown):
        return survey
    try:
        return await survey.redis()
    except StoreError as error:
        return Unknown(str(error))


async def _pools(
    survey: Survey | Unknown, gateways: Iterable[GatewayEvidence], replicas: Iterable[ReplicaEvidence]
) -> list[str]:
    """The names of all pools. Redis lists a pool only if it has agents, so gateways and replicas count as well."""
    names = {name for gateway in gateways for name in gateway.pools} | {replica.pool for replica in replicas}
    if isinstance(survey, Survey):
        with suppress(StoreError):
            names |= set(await survey.pools())
    return sorted(names - {""})


async def _pools_in_redis(
    survey: Survey | Unknown, names: Iterable[str], lasting: set[str] | None
) -> tuple[PoolEvidence, ...]:
    """The pools with a first snapshot each, not yet with replicas. A dead replica counts as retired if it is not in
    `lasting`, the configured ones; None if the configuration is unknown."""
    return tuple([_with_snapshot(PoolEvidence(name), await _snapshot(survey, name), lasting) for name in names])


async def _with_more_snapshots(survey: Survey | Unknown, pools: tuple[PoolEvidence, ...]) -> tuple[PoolEvidence, ...]:
    """Adds a few snapshots, over seconds: some things are wrong only if they last."""
    for _ in range(_MORE_SNAPSHOTS if any(pool.snapshots for pool in pools) else 0):
        await asyncio.sleep(_BETWEEN_SNAPSHOTS_S)
        taken = [await _snapshot(survey, pool.name) for pool in pools]
        pools = tuple(
            replace(pool, snapshots=(*pool.snapshots, snapshot)) if snapshot else pool
            for pool, snapshot in zip(pools, taken, strict=True)
        )
    return pools


async def _snapshot(survey: Survey | Unknown, name: str) -> PoolSnapshot | None:
    if isinstance(survey, Unknown):
        return None
    try:
        return await (await survey.for_pool(name)).snapshot(name)
    except StoreError:
        return None


def _with_snapshot(pool: PoolEvidence, snapshot: PoolSnapshot | None, lasting: set[str] | None) -> PoolEvidence:
    if snapshot is None:
        return pool
    dead = {name for name, record in snapshot.state.replicas.items() if record.state == "dead"}
    return replace(
        pool, snapshots=(snapshot,), retired=frozenset(dead - lasting) if lasting is not None else frozenset()
    )


def _unasked(pools: Iterable[PoolEvidence], configured: tuple[ReplicaEvidence, ...]) -> list[ReplicaEvidence]:
    known = {replica.id for replica in configured}
    return [
        ReplicaEvidence(record.replica, record.url, pool.name)
        for pool in pools
        for record in pool.records()
        if record.replica not in known
    ]


def _model(replicas: Iterable[ReplicaEvidence]) -> str | None:
    """A model's name that clients may use."""
    return next(
        (replica.cards[0].id for replica in replicas if isinstance(replica.cards, tuple) and replica.cards), None
    )


def _by_pool(
    pools: tuple[PoolEvidence, ...], replicas: tuple[ReplicaEvidence, ...]
) -> tuple[tuple[PoolEvidence, ...], tuple[ReplicaEvidence, ...]]:
    """The pools with their replicas, and the replicas of no known pool. A replica that does not answer is in the pool
    that Redis has it in."""
    registered = {record.replica: pool.name for pool in pools for record in pool.records()}
    placed = [replace(replica, pool=replica.pool or registered.get(replica.id, "")) for replica in replicas]
    return (
        tuple(replace(pool, replicas=tuple(each for each in placed if each.pool == pool.name)) for pool in pools),
        tuple(each for each in placed if not each.pool),
    )
