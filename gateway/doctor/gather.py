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
    survey = await _told(Survey.open(targets.redis_url, timeout_s, targets.namespace))
    upstream = Upstream(timeout_s, targets.replica_key, contexts_of(targets.replica_certificate))
    configured = tuple(ReplicaEvidence(one.id, one.url) for one in targets.replicas or ())
    known = {replica.id for replica in configured}
    lasting = None if targets.discovers or not configured else known
    try:
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=tls_context()) as http:
            redis = survey if isinstance(survey, Unknown) else await _told(survey.redis())  # alone: it measures times
            gateways, lmcache, replicas = await asyncio.gather(
                _each(ask_gateway(http, url, timeout_s) for url in targets.gateways),
                _each(ask_lmcache(http, url, timeout_s) for url in targets.lmcache),
                _each(ask_replica(upstream, replica, True, timeout_s) for replica in configured),
            )
            seen = await _first_snapshots(survey, gateways, replicas)
            found = _registered([_pool(name, snapshots, lasting) for name, snapshots in seen.items()])
            unasked = [each for name, each in found.items() if name not in known and targets.asks_registered]
            _, others = await asyncio.gather(
                _add_snapshots(survey, seen),
                _each(ask_replica(upstream, replica, False, timeout_s) for replica in unasked),
            )
            replicas += others
            gateways = await with_keys(http, gateways, _model(replicas), targets.api_key, timeout_s)
    finally:
        await upstream.close()
        if isinstance(survey, Survey):
            await survey.close()
    # A replica that does not answer is in the pool that Redis has it in.
    found = _registered([_pool(name, snapshots, lasting) for name, snapshots in seen.items()])
    placed = [replace(each, pool=each.pool or (found[each.id].pool if each.id in found else "")) for each in replicas]
    pools = (_pool(name, snapshots, lasting, placed) for name, snapshots in seen.items())
    homeless = tuple(each for each in placed if not each.pool)
    itself = () if targets.itself is None else (targets.itself,)
    return Evidence(redis, tuple(pools), homeless, (*itself, *gateways), lmcache, targets.settings)


async def _each(asked: Iterable[Awaitable[_Evidence]]) -> tuple[_Evidence, ...]:
    return tuple(await asyncio.gather(*asked))


async def _told(asked: Awaitable[_Evidence]) -> _Evidence | Unknown:
    try:
        return await asked
    except StoreError as error:
        return Unknown(str(error))


async def _first_snapshots(
    survey: Survey | Unknown, gateways: Iterable[GatewayEvidence], replicas: Iterable[ReplicaEvidence]
) -> dict[str, list[PoolSnapshot]]:
    """One snapshot of each pool, by name; none if Redis does not answer. Redis lists a pool only if it has agents, so
    gateways and replicas count as well."""
    names = {name for gateway in gateways for name in gateway.pools} | {replica.pool for replica in replicas}
    if isinstance(survey, Survey) and not isinstance(listed := await _told(survey.pools()), Unknown):
        names |= set(listed)
    seen: dict[str, list[PoolSnapshot]] = {name: [] for name in sorted(names - {""})}
    await _add_to(survey, seen)
    return seen


async def _add_snapshots(survey: Survey | Unknown, seen: dict[str, list[PoolSnapshot]]) -> None:
    """Add a few, over seconds: some things are wrong only if they last."""
    for _ in range(_MORE_SNAPSHOTS if any(seen.values()) else 0):
        await asyncio.sleep(_BETWEEN_SNAPSHOTS_S)
        await _add_to(survey, seen)


async def _add_to(survey: Survey | Unknown, seen: dict[str, list[PoolSnapshot]]) -> None:
    if isinstance(survey, Survey):
        for name, snapshots in seen.items():
            with suppress(StoreError):
                snapshots.append(await (await survey.for_pool(name)).snapshot(name))


def _pool(
    name: str, snapshots: list[PoolSnapshot], lasting: set[str] | None, replicas: Iterable[ReplicaEvidence] = ()
) -> PoolEvidence:
    """A dead replica counts as retired if it is not in `lasting`, the configured ones; None if these are unknown."""
    records = snapshots[0].state.replicas if snapshots and lasting is not None else {}
    retired = frozenset(each for each, record in records.items() if record.state == "dead") - (lasting or set())
    return PoolEvidence(name, tuple(each for each in replicas if each.pool == name), tuple(snapshots), retired)


def _registered(pools: Iterable[PoolEvidence]) -> dict[str, ReplicaEvidence]:
    """The replicas that Redis names, not asked yet."""
    return {
        record.replica: ReplicaEvidence(record.replica, record.url, pool.name)
        for pool in pools
        for record in pool.records()
    }


def _model(replicas: Iterable[ReplicaEvidence]) -> str | None:
    """A model's name that clients may use."""
    return next(
        (replica.cards[0].id for replica in replicas if isinstance(replica.cards, tuple) and replica.cards), None
    )
