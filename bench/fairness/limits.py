"""Limits of a tenant hold over four gateways.

concurrency  a tenant that may have 8 requests in flight asks with 40 clients. Replicas and Redis never show more
             than 8, and do show 8
tokens       a tenant asks for more than its tokens_per_min. Some of its answers are shorter than estimated, and
             some are longer. At no moment has it used more than `budget` allows
killed       eight long requests run, two on each gateway, and others wait. A gateway is killed, which ends two of them.
             How long until eight run again?
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rich.table import Table

from bench import tables
from bench.cluster import Cluster
from bench.embedded import connect
from bench.fairness.budget import Taken, allowed_tokens, least_left_tokens, overdraft_tokens, used_tokens
from bench.fairness.fleet import Fleet
from bench.fairness.load import Load, running
from bench.fairness.row import Row
from bench.fairness.tenants import Tenant, config
from bench.fairness.watch import InFlight, every_look, reserved_tokens
from coordinator.keys import PoolKeys

GATEWAYS, CONCURRENCY, CLIENTS = 4, 8, 40
TOKENS_PER_MIN = 30_000
FREE_WITHIN_S = 5.0
KILLS = 4
_FLEET = Fleet(slots=64, decode_s_per_token=0.02)
_CAPPED = Tenant("capped", 100, 30, limits={"concurrency": CONCURRENCY})
_METERED = Tenant("metered", 300, 30, limits={"tokens_per_min": TOKENS_PER_MIN})
_ENDLESS_TOKENS = 6000
_SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 60, "maxItems": 60}
_ANSWERS: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 300, "stop": ["e"]},
    {"max_tokens": None, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
)
"""As long as estimated; much shorter; longer than this tenant's answers are on average."""


@dataclass(frozen=True)
class ConcurrencyRow(Row):
    part: ClassVar[str] = "limits"
    gateways: int
    concurrency: int
    clients: int
    seconds: float
    most_running: int
    """At all replicas together."""
    most_counted: int
    """By Redis."""
    looks: int
    answered: int
    failed: dict[str, int]


@dataclass(frozen=True)
class TokensRow(Row):
    part: ClassVar[str] = "limits"
    gateways: int
    tokens_per_min: int
    seconds: float
    used_tokens: int
    allowed_tokens: float
    """By the end: the limit, the burst and the overdraft."""
    overdraft_tokens: int
    """By the end: of the last request and of wrong estimates."""
    least_left_tokens: float
    """Of what was allowed, at the moment at which the least was left."""
    answered: int
    too_low: int
    """Requests that took more than was estimated."""
    unseen: int
    """Requests whose estimate nobody saw."""
    failed: dict[str, int]


@dataclass(frozen=True)
class KilledRow(Row):
    part: ClassVar[str] = "limits"
    gateways: int
    concurrency: int
    full_again_s: list[float]
    """For each kill."""
    most_running: int
    most_counted: int


def concurrency_goals(most_running: int, most_counted: int) -> dict[str, bool]:
    return {
        f"never more than {CONCURRENCY} in flight": max(most_running, most_counted) <= CONCURRENCY,
        f"{CONCURRENCY} in flight are reached": min(most_running, most_counted) >= CONCURRENCY,
    }


def measure(seconds: float, limit_seconds: float) -> Iterator[Row]:
    """The rows, one after the other. The tokens are counted for `limit_seconds`."""
    for tenant, run in (
        (_CAPPED, lambda cluster: _concurrency(cluster, seconds)),
        (_METERED, lambda cluster: _Metered(cluster).measure(limit_seconds)),
        (_CAPPED, _killed),
    ):
        with _FLEET.cluster(GATEWAYS, config([tenant], {}, None)) as cluster:
            yield asyncio.run(run(cluster))


async def _concurrency(cluster: Cluster, seconds: float) -> ConcurrencyRow:
    load, flight = Load([_CAPPED], cluster.gateway_urls), InFlight(cluster, _CAPPED.name)
    async with asyncio.TaskGroup() as tasks:
        with running(tasks, [flight.watch(), *(load.keep_asking(_CAPPED) for _ in range(CLIENTS))]):
            await asyncio.sleep(seconds)
            row = ConcurrencyRow(
                gateways=GATEWAYS,
                concurrency=CONCURRENCY,
                clients=CLIENTS,
                seconds=seconds,
                most_running=flight.most_running,
                most_counted=flight.most_counted,
                looks=flight.looks,
                answered=len(load.sent),
                failed=dict(load.failed),
                goals=concurrency_goals(flight.most_running, flight.most_counted),
            )
    load.close()
    return row


@dataclass
class _Metered:
    """One client for each gateway, so that each reservation is known to be that of the client's request."""

    cluster: Cluster
    taken: list[Taken] = field(default_factory=list)
    _began_s: float = 0.0
    _known: set[str] = field(default_factory=set)
    """Reservations that were seen."""
    _estimates: list[int | None] = field(default_factory=lambda: [None] * GATEWAYS)
    """Of the running request of each client."""

    async def measure(self, seconds: float) -> TokensRow:
        load = Load([_METERED], self.cluster.gateway_urls)
        self._began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            clients = [self._keep_asking(load, at, url) for at, url in enumerate(self.cluster.gateway_urls)]
            with running(tasks, [self._watch(), *clients]):
                await asyncio.sleep(seconds)
        load.close()
        return self._row(seconds, load)

    async def _keep_asking(self, load: Load, gateway: int, url: str) -> None:
        number = gateway
        while True:
            self._estimates[gateway] = None
            sent = await load.ask(_METERED, url, **_ANSWERS[number % len(_ANSWERS)])
            if sent is None:
                await asyncio.sleep(0.1)
                continue
            number += 1
            times_s = sent.sent_s - self._began_s, sent.ended_s - self._began_s
            self.taken.append(Taken(*times_s, sent.limit_tokens, self._estimates[gateway]))

    async def _watch(self) -> None:
        keys, wire = PoolKeys(self.cluster.pool), await connect(self.cluster.redis_url)
        live = sorted([name.decode() for name in await wire.send("HKEYS", keys.gateways)])

        async def look() -> None:
            for gateway, name in enumerate(live):
                for reservation, tokens in (await reserved_tokens(wire, keys, name)).items():
                    if reservation not in self._known:
                        self._known.add(reservation)
                        self._estimates[gateway] = tokens

        try:
            await every_look(look)
        finally:
            await wire.close("the run is over")

    def _row(self, seconds: float, load: Load) -> TokensRow:
        taken, left = self.taken, least_left_tokens(self.taken, TOKENS_PER_MIN)
        return TokensRow(
            gateways=GATEWAYS,
            tokens_per_min=TOKENS_PER_MIN,
            seconds=seconds,
            used_tokens=used_tokens(taken, seconds),
            allowed_tokens=round(allowed_tokens(taken, TOKENS_PER_MIN, seconds)),
            overdraft_tokens=overdraft_tokens(taken, seconds),
            least_left_tokens=round(left),
            answered=len(taken),
            too_low=sum(each.error_tokens > 0 for each in taken),
            unseen=sum(each.estimated_tokens is None for each in taken),
            failed=dict(load.failed),
            goals={"never used more than the limit, the burst and the errors of estimates": left >= 0},
        )


async def _killed(cluster: Cluster) -> KilledRow:
    rounds = [await _kill(cluster, number % GATEWAYS) for number in range(KILLS)]
    running, counted = (max(each[at] for each in rounds) for at in (1, 2))
    full_again_s = [round(each[0], 2) for each in rounds]
    return KilledRow(
        gateways=GATEWAYS,
        concurrency=CONCURRENCY,
        full_again_s=full_again_s,
        most_running=int(running),
        most_counted=int(counted),
        goals={f"{CONCURRENCY} in flight again within {FREE_WITHIN_S:g} s": max(full_again_s) <= FREE_WITHIN_S}
        | concurrency_goals(int(running), int(counted)),
    )


async def _kill(cluster: Cluster, gateway: int) -> tuple[float, int, int]:
    """The seconds from the kill until all are in flight again, and the most that replicas and Redis showed."""
    load, flight, urls = Load([_CAPPED], cluster.gateway_urls), InFlight(cluster, _CAPPED.name), cluster.gateway_urls
    others = [url for url in urls if url != urls[gateway]]

    def ask(url: str) -> asyncio.Task[Any]:
        return tasks.create_task(load.ask(_CAPPED, url, max_tokens=_ENDLESS_TOKENS))

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        with running(tasks, [flight.watch()]):
            asking = [ask(urls[number % GATEWAYS]) for number in range(CONCURRENCY)]
            await flight.until(lambda: flight.running == flight.counted == CONCURRENCY)
            asking = [ask(others[number % len(others)]) for number in range(CONCURRENCY)] + asking
            await asyncio.sleep(0.5)
            killed_s = time.monotonic()
            cluster.gateway_processes[gateway].kill()
            await flight.until(lambda: flight.running < CONCURRENCY)
            await flight.until(lambda: flight.running == flight.counted == CONCURRENCY)
            full_again_s = time.monotonic() - killed_s
        for task in asking:  # first those that wait
            task.cancel()
    load.close()
    await _start_again(cluster, gateway)
    return full_again_s, flight.most_running, flight.most_counted


async def _start_again(cluster: Cluster, gateway: int) -> None:
    """Starts a killed gateway, and waits until it serves and nothing is in flight."""
    flight, load = InFlight(cluster, _CAPPED.name), Load([_CAPPED], [cluster.gateway_urls[gateway]])
    cluster.gateway_processes[gateway].start()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        with running(tasks, [flight.watch()]):
            await flight.until(lambda: flight.looks > 0 and flight.running == flight.counted == 0)
    async with asyncio.timeout(30):
        await load.ask_until_answered(_CAPPED)
    load.close()


def table(rows: Sequence[Row]) -> Table:
    drawn = tables.table(f"Limits of a tenant over {GATEWAYS} gateways", ("limit", "found"), ("goal",))
    for row in rows:
        if isinstance(row, ConcurrencyRow):
            found = f"{row.most_running} at replicas, {row.most_counted} in Redis at most ({row.looks} looks)"
            drawn.add_row(f"concurrency {row.concurrency}, {row.clients} clients", found, row.verdict)
        elif isinstance(row, TokensRow):
            found = f"{row.used_tokens} used of {row.allowed_tokens:.0f} allowed in {row.seconds:g} s"
            found += f"; {row.least_left_tokens:.0f} left at least; estimates too low: {row.too_low} of {row.answered}"
            drawn.add_row(f"tokens_per_min {row.tokens_per_min}", found, row.verdict)
        elif isinstance(row, KilledRow):
            found = (
                f"{', '.join(f'{each:g}' for each in row.full_again_s)} s until {row.concurrency} were in flight again"
            )
            drawn.add_row("concurrency, a gateway killed", found, row.verdict)
    return drawn
