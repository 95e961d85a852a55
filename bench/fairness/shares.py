"""Each tenant gets the share of its weight, whatever the others send and through which gateways.

Three tenants ask for 1.5, 2 and 3 times what three replicas can do. `few` and `double`, with the weights 1 and 2, ask
for 1.3 times their shares, through all gateways. `many`, with the weight 1, asks for all the rest, through one gateway
only: that is more than ten times the requests of `few`. Requests come at random moments, whatever happened to earlier
ones. Before these, each tenant sends as many as replicas have slots, so that all of them wait from the beginning.

Jain's index is over what each tenant was charged, divided by its weight. 1 means equal, 0.33 that one of three got
everything.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.table import Table

from bench import tables
from bench.cluster import running_replicas
from bench.fairness.capacity import Needs, fair_rates, greedy_rates, measured_needs, slots_used
from bench.fairness.fleet import Fleet
from bench.fairness.load import Load, per_s, running
from bench.fairness.row import Row
from bench.fairness.tenants import Tenant, config
from bench.fairness.watch import MostActive
from bench.load import MODEL, percentile
from bench.machine import IdleShare
from bench.peers import Peer, running_peer
from coordinator.keys import PoolKeys

OURS = "KVGate"
TENANTS = (
    Tenant("many", 60, 8, is_on_one_gateway=True),
    Tenant("few", 900, 60),
    Tenant("double", 300, 30, weight=2),
)
FACTORS = (1.5, 2.0, 3.0)
LEAST_JAIN = 0.98
MOST_SPREAD = 0.01
"""Between numbers of gateways."""
_MORE_THAN_FAIR = 1.3
_GREEDY = "many"
_FLEET = Fleet(slots=8)
_WARM_UP_S = 8.0


@dataclass(frozen=True)
class SharesRow(Row):
    """One system under one load."""

    part: ClassVar[str] = "shares"
    system: str
    gateways: int
    factor: float
    """How many times the measured capacity was asked for."""
    capacity_per_s: float
    """Requests, if each tenant gets its share."""
    offered_per_s: dict[str, float]
    answered_per_s: dict[str, float]
    jain: float
    shares: dict[str, float]
    """What each tenant was charged, of everything."""
    busy: float
    """The part of the slots that answered requests held."""
    most_active: int | None
    """Requests on one replica, as Redis showed them."""
    fallbacks: int
    """Requests that gateways placed without Redis, because it did not answer in time. Such a request takes no turn."""
    took_p50_s: dict[str, float]
    failed: dict[str, int]
    idle: float
    """The idle share of the machine."""


@dataclass(frozen=True)
class SpreadRow(Row):
    """Jain's index with different numbers of gateways under one load."""

    part: ClassVar[str] = "shares"
    factor: float
    jain: dict[str, float]
    """By the number of gateways."""


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


@dataclass(frozen=True)
class Run:
    """One load on one system."""

    needs: Needs
    factor: float
    seconds: float

    @property
    def rates(self) -> dict[str, float]:
        return greedy_rates(TENANTS, self.needs, _FLEET.all_slots, _GREEDY, self.factor, _MORE_THAN_FAIR)

    async def measure(self, system: str, urls: Sequence[str], redis: tuple[str, PoolKeys] | None) -> SharesRow:
        """`redis` is the cluster's, with the keys of its pool."""
        load, active = Load(TENANTS, urls), MostActive(redis[1]) if redis else None
        async with asyncio.TaskGroup() as tasks:
            loads = [load.offer(each, self.rates[each.name], _FLEET.all_slots) for each in TENANTS]
            watching = [active.watch(redis[0])] if redis and active else []
            with running(tasks, [*loads, *watching]):
                await asyncio.sleep(_WARM_UP_S)
                load.count_from_now()
                idle = IdleShare()
                await asyncio.sleep(self.seconds)
                row = self._row(system, len(urls), load, active, idle())
        load.close()
        return row

    def _row(self, system: str, gateways: int, load: Load, active: MostActive | None, idle: float) -> SharesRow:
        sent = {each.name: load.of(each.name) for each in TENANTS}
        charged = Counter({name: sum(each.charge_tokens for each in own) for name, own in sent.items()})
        answered = {name: len(own) / self.seconds for name, own in sent.items()}
        index = round(jain([charged[each.name] / each.weight for each in TENANTS]), 4)
        return SharesRow(
            system=system,
            gateways=gateways,
            factor=self.factor,
            capacity_per_s=round(sum(fair_rates(TENANTS, self.needs, _FLEET.all_slots).values()), 2),
            offered_per_s=per_s(load.offered, self.seconds),
            answered_per_s=per_s(answered, 1),
            jain=index,
            shares={name: round(tokens / max(1, charged.total()), 3) for name, tokens in charged.items()},
            busy=round(slots_used(answered, self.needs) / _FLEET.all_slots, 3),
            most_active=active.most if active else None,
            fallbacks=sum(each.decision == "fallback" for own in sent.values() for each in own),
            took_p50_s={name: round(percentile([each.took_s for each in own], 0.5), 2) for name, own in sent.items()},
            failed=dict(load.failed),
            idle=round(idle, 3),
            goals={f"Jain's index at least {LEAST_JAIN}": index >= LEAST_JAIN} if system == OURS else {},
        )


def measure(gateways: Sequence[int], seconds: float) -> Iterator[Row]:
    """The rows of KVGate, one after the other."""
    for run in _runs(seconds):
        by_gateways = {}
        for count in gateways:
            row = _on_kvgate(run, count)
            by_gateways[count] = row.jain
            yield row
        yield spread(run.factor, by_gateways)
        yield _on_kvgate(run, max(gateways), has_queue=False)


def measure_peer(peer: Peer, seconds: float) -> Iterator[Row]:
    """The rows of a peer that is installed. It knows no tenants. Raises DoesNotStart."""
    for run in _runs(seconds):
        with (
            tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder,
            running_replicas(Path(folder), _FLEET.replicas, _FLEET.arguments) as replicas,
            running_peer(peer, [replica.url for replica in replicas], MODEL) as (url, _),
        ):
            yield asyncio.run(run.measure(peer.name, [url], None))


def _runs(seconds: float) -> list[Run]:
    needs = measured_needs(_FLEET, TENANTS, max(8.0, seconds / 2))
    return [Run(needs, factor, seconds) for factor in FACTORS]


def spread(factor: float, by_gateways: Mapping[int, float]) -> SpreadRow:
    """Compares Jain's index with different numbers of gateways."""
    differs = max(by_gateways.values()) - min(by_gateways.values())
    goals = {f"with any number of gateways the same, within {MOST_SPREAD}": differs <= MOST_SPREAD}
    return SpreadRow(factor=factor, jain={str(count): index for count, index in by_gateways.items()}, goals=goals)


def _on_kvgate(run: Run, gateways: int, *, has_queue: bool = True) -> SharesRow:
    queue, slots = ({}, _FLEET.slots) if has_queue else ({"max_wait_s": 0}, None)
    with _FLEET.cluster(gateways, config(TENANTS, queue, slots)) as cluster:
        system = OURS if has_queue else f"{OURS} without queue"
        return asyncio.run(run.measure(system, cluster.gateway_urls, (cluster.redis_url, PoolKeys(cluster.pool))))


def table(rows: Sequence[Row]) -> Table:
    names = [f"{each.name}: asked/s, got/s, share" for each in TENANTS]
    drawn = tables.table(
        "Shares: three tenants (weights 1, 1, 2) ask for more than there is",
        ("system",),
        ("gateways", "load", "Jain", *names, "busy", "most active", "failed", "idle", "goal"),
        caption=f"goal: Jain's index at least {LEAST_JAIN}, and within {MOST_SPREAD} the same for all numbers of "
        "gateways. load: times the measured capacity. busy: the used part of all slots.",
    )
    for row in rows:
        if isinstance(row, SharesRow):
            cells = [
                f"{row.offered_per_s.get(name, 0):.1f}, {row.answered_per_s[name]:.1f}, {100 * share:.1f}%"
                for name, share in row.shares.items()
            ]
            most = "-" if row.most_active is None else str(row.most_active)
            more = f"{row.busy:.0%}", most, str(sum(row.failed.values())), f"{row.idle:.0%}", row.verdict
            drawn.add_row(row.system, str(row.gateways), f"{row.factor:g}", f"{row.jain:.3f}", *cells, *more)
        elif isinstance(row, SpreadRow):
            between = f"{min(row.jain.values()):.3f} to {max(row.jain.values()):.3f}"
            drawn.add_row(OURS, "all", f"{row.factor:g}", between, *"-" * 7, row.verdict)
    return drawn
