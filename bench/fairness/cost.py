"""What the queue takes of throughput and of the cache.

Questions about documents that many requests share (the mix `rag` of `bench.routing`, twice as long) go to three
replicas through four gateways. Clients send one request after the other: three for four slots of the replicas, and
three for two. Without the queue, requests wait in the replicas. With the queue, each replica gets as many as it runs at
once, or twice as many, and the others wait in Redis. All get the same requests in the same order, seed by seed, and
run by turns. Runs differ by themselves, too: a second run without the queue tells by how much.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median, stdev
from typing import Any, ClassVar

from rich.table import Table

from bench import tables
from bench.cluster import running_gateways
from bench.fairness.row import Row
from bench.fairness.tenants import config
from bench.load import Spread, random_spread
from bench.routing import measure as routing
from bench.routing.fleets import Fleet, simulated
from bench.routing.mixes import MIXES, Mix, rag
from bench.routing.systems import System
from bench.workloads import Session

MOST_LOST = 0.02
CLIENTS_PER_SLOT = (0.75, 1.5)
CAPS_PER_SLOT = (0, 1, 2)
"""0: no queue."""
SEEDS = (11, 12, 13)
_GATEWAYS, _SLOTS, _SPEED = 4, 8, 2.0
_RAG = MIXES["rag"]


@dataclass(frozen=True)
class CostRow(Row):
    """The same requests with the queue and without it. Medians over seeds; each pair has the queue first."""

    part: ClassVar[str] = "cost"
    gateways: int
    clients: int
    slots: int
    """Of all replicas."""
    cap: int
    """With the queue: how many requests a replica gets at most. 0: the first of each pair has no queue either."""
    seeds: list[int]
    requests_per_s: tuple[float, float]
    cache_share: tuple[float, float]
    ttft_p50_ms: tuple[float, float]
    ttft_p99_ms: tuple[float, float]
    by_seed_per_s: list[tuple[float, float]]
    by_seed_cache_share: list[tuple[float, float]]
    failed: int
    idle: float


@dataclass(frozen=True)
class InAll(Row):
    """All pairs with the queue, of all rows. Each figure is the geometric mean of a share of what there is without the
    queue, and its standard error."""

    part: ClassVar[str] = "cost"
    pairs: int
    requests_per_s: tuple[float, float]
    cache_share: tuple[float, float]


def in_all(rows: Sequence[CostRow]) -> InAll:
    with_queue = [row for row in rows if row.cap]
    per_s = share_of([pair for row in with_queue for pair in row.by_seed_per_s])
    cache_share = share_of([pair for row in with_queue for pair in row.by_seed_cache_share])
    pairs = sum(len(row.seeds) for row in with_queue)
    return InAll(pairs=pairs, requests_per_s=per_s, cache_share=cache_share, goals=goals(per_s[0], cache_share[0]))


def share_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The geometric mean of the pairs' quotients, and its standard error; 0 for less than two pairs."""
    logs = [math.log(one / other) for one, other in pairs]
    error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return round(math.exp(mean(logs)), 4), round(error, 4)


def goals(per_s: float, cache_share: float) -> dict[str, bool]:
    """Of these shares of what there is without the queue."""
    least = 1 - MOST_LOST
    return {
        f"at least {least:g} of the throughput without queue": per_s >= least,
        f"at least {least:g} of the cache share without queue": cache_share >= least,
    }


def measure(seeds: Sequence[int]) -> Iterator[CostRow | InAll]:
    """The rows, one after the other."""
    rows: list[CostRow] = []
    for clients_per_slot in CLIENTS_PER_SLOT:
        clients = round(clients_per_slot * _SLOTS * _RAG.replicas)
        mix = replace(_RAG, make=partial(rag, requests=600), concurrency=clients)
        runs: dict[int, list[tuple[routing.Row, routing.Row]]] = {each * _SLOTS: [] for each in CAPS_PER_SLOT}
        for seed in seeds:
            without = _one(mix, seed, 0)
            for cap, pairs in runs.items():
                pairs.append((_one(mix, seed, cap), without))
        for cap, pairs in runs.items():
            rows.append(_row(mix, seeds, cap, pairs))
            yield rows[-1]
    yield in_all(rows)


def _one(mix: Mix, seed: int, cap: int) -> routing.Row:
    """With the queue and this cap; without a cap, without the queue."""
    settings = config([], {}, cap) if cap else config([], {"max_wait_s": 0}, None)
    system = System("with queue" if cap else "without queue", _GATEWAYS, partial(_start, settings))
    with simulated(mix, _SPEED, _SLOTS) as fresh, fresh() as fleet:
        return asyncio.run(routing.measure(fleet, mix, mix.make(seed), system, seed))


@asynccontextmanager
async def _start(
    settings: dict[str, Any], fleet: Fleet, _sessions: Sequence[Session], seed: int
) -> AsyncIterator[Spread]:
    with running_gateways(fleet.urls, gateways=_GATEWAYS, config=settings) as cluster:
        yield random_spread(cluster.gateway_urls, seed)


def _row(mix: Mix, seeds: Sequence[int], cap: int, pairs: Sequence[tuple[routing.Row, routing.Row]]) -> CostRow:
    def medians(of: Any, digits: int) -> tuple[float, float]:
        with_queue, without = ([of(pair[at]) for pair in pairs] for at in (0, 1))
        return round(median(with_queue), digits), round(median(without), digits)

    per_s, cache_share = medians(lambda row: row.per_s, 3), medians(lambda row: row.cache_share, 4)
    return CostRow(
        gateways=_GATEWAYS,
        clients=mix.concurrency,
        slots=_SLOTS * mix.replicas,
        cap=cap,
        seeds=list(seeds),
        requests_per_s=per_s,
        cache_share=cache_share,
        ttft_p50_ms=medians(lambda row: row.percentile_ms(0.5), 1),
        ttft_p99_ms=medians(lambda row: row.percentile_ms(0.99), 1),
        by_seed_per_s=[(one.per_s, other.per_s) for one, other in pairs],
        by_seed_cache_share=[(one.cache_share, other.cache_share) for one, other in pairs],
        failed=sum(row.failed for pair in pairs for row in pair),
        idle=min(row.idle for pair in pairs for row in pair),
    )


def table(rows: Sequence[Row]) -> Table:
    figures = "requests/s", "of it", "cached", "of it", "TTFT p50 ms", "TTFT p99 ms"
    drawn = tables.table(
        "Cost: clients ask about shared documents; with the queue, without it",
        (),
        ("clients", "slots", "cap", *figures, "failed", "idle", "goal"),
        caption=f"goal: in all, with the queue at least {1 - MOST_LOST:g} of what there is without it",
    )
    for row in rows:
        if isinstance(row, CostRow):
            drawn.add_row(
                str(row.clients),
                str(row.slots),
                str(row.cap),
                "{:.2f}, {:.2f}".format(*row.requests_per_s),
                f"{row.requests_per_s[0] / row.requests_per_s[1]:.1%}",
                "{:.1%}, {:.1%}".format(*row.cache_share),
                f"{row.cache_share[0] / row.cache_share[1]:.1%}",
                "{:.0f}, {:.0f}".format(*row.ttft_p50_ms),
                "{:.0f}, {:.0f}".format(*row.ttft_p99_ms),
                str(row.failed),
                f"{row.idle:.0%}",
                row.verdict,
            )
        elif isinstance(row, InAll):
            per_s, cached = ("{:.1%} ± {:.1%}".format(*figure) for figure in (row.requests_per_s, row.cache_share))
            drawn.add_row("in all", f"{row.pairs} pairs", "", "", per_s, "", cached, "", "", "", "", row.verdict)
    return drawn
