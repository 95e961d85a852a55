"""Requests of the first band hardly wait, and the last band goes on.

First, `realtime` asks alone for half of what the replicas can do: that is what its users are used to. Then, on the same
cluster, others come, until twice the capacity is asked for. All answers are streamed, and requests come at random
moments, whatever happened to earlier ones.

    more batch   `normal` asks for a fifth of the capacity, and `batch` for 1.3 times as much as there is. Bands are the
                 defaults: `normal` and `batch` use 80 % of the room at most
    more normal  the same bands; `normal` asks for all of the capacity, and `batch` for half of it
    all room     the same load, and `normal` may use all of the room. So each request of `realtime` waits until another
                 one ends
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rich.table import Table

from bench import tables
from bench.fairness.capacity import Needs, measured_needs
from bench.fairness.fleet import Fleet
from bench.fairness.load import Load, per_s, running
from bench.fairness.row import Row
from bench.fairness.tenants import Tenant, config
from bench.load import percentile
from bench.machine import IdleShare

TENANTS = tuple(Tenant(band, 200, 20, priority=band) for band in ("realtime", "normal", "batch"))
OWN_LOAD = 0.5
"""What `realtime` asks for, of the capacity."""
MOST_TTFT_RATIO = 1.3
_FLEET = Fleet(slots=32, decode_s_per_token=0.1)
_WARM_UP_S = 6.0


@dataclass(frozen=True)
class _Others:
    """What others than `realtime` ask for, in parts of the capacity, and the gateways' `queue`."""

    normal: float
    batch: float
    queue: Mapping[str, Any] = field(default_factory=dict)

    @property
    def loads(self) -> dict[str, float]:
        """With `realtime`."""
        return {"realtime": OWN_LOAD, "normal": self.normal, "batch": self.batch}


_ALL_ROOM = [{"name": "realtime"}, {"name": "normal", "room_share": 1.0}, {"name": "batch"}]
OTHERS = {
    "more batch": _Others(0.2, 1.3),
    "more normal": _Others(1.0, 0.5),
    "all room": _Others(1.0, 0.5, {"bands": _ALL_ROOM}),
}


@dataclass(frozen=True)
class PrioritiesRow(Row):
    """`realtime` alone and beside the others, on one cluster."""

    part: ClassVar[str] = "priorities"
    gateways: int
    others: str
    factor: float
    """How many times the measured capacity all of them asked for."""
    own_load: float
    capacity_per_s: float
    alone_ttft_p50_ms: float
    alone_ttft_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    requests: tuple[int, int]
    """Of `realtime`, alone and beside the others."""
    tokens_per_s: dict[str, float]
    """Of answers, by tenant, beside the others."""
    failed: dict[str, int]
    idle: float

    @property
    def ratio(self) -> float:
        """TTFT p99 beside the others, of that alone."""
        return self.ttft_p99_ms / self.alone_ttft_p99_ms if self.alone_ttft_p99_ms else 0.0


@dataclass(frozen=True)
class _Seen:
    """What came of one load."""

    ttft_s: list[float]
    tokens_per_s: dict[str, float]
    failed: dict[str, int]
    idle: float

    def ttft_ms(self, share: float) -> float:
        return round(1000 * percentile(self.ttft_s, share), 1)


def goals(alone_ms: float, beside_ms: float, batch_tokens_per_s: float) -> dict[str, bool]:
    """Whether `realtime` was kept from the others, and `batch` went on."""
    return {
        f"TTFT p99 of realtime at most {MOST_TTFT_RATIO} times that alone": 0 < beside_ms <= MOST_TTFT_RATIO * alone_ms,
        "batch goes on": batch_tokens_per_s > 0,
    }


def measure(gateways: Sequence[int], seconds: float) -> Iterator[PrioritiesRow]:
    """The rows, one after the other."""
    needs = measured_needs(_FLEET, TENANTS, max(8.0, seconds / 4))
    for count in gateways:
        for others in OTHERS:
            with _FLEET.cluster(count, config(TENANTS, OTHERS[others].queue, _FLEET.slots)) as cluster:
                yield asyncio.run(_measure(cluster.gateway_urls, needs, others, seconds))


async def _measure(urls: Sequence[str], needs: Needs, others: str, seconds: float) -> PrioritiesRow:
    loads = OTHERS[others].loads
    alone = await _under(urls, needs, {"realtime": OWN_LOAD}, seconds)
    beside = await _under(urls, needs, loads, seconds)
    return PrioritiesRow(
        gateways=len(urls),
        others=others,
        factor=round(sum(loads.values()), 2),
        own_load=OWN_LOAD,
        capacity_per_s=round(_rate("realtime", 1.0, needs), 2),
        alone_ttft_p50_ms=alone.ttft_ms(0.5),
        alone_ttft_p99_ms=alone.ttft_ms(0.99),
        ttft_p50_ms=beside.ttft_ms(0.5),
        ttft_p99_ms=beside.ttft_ms(0.99),
        requests=(len(alone.ttft_s), len(beside.ttft_s)),
        tokens_per_s=beside.tokens_per_s,
        failed=alone.failed | beside.failed,
        idle=round(min(alone.idle, beside.idle), 3),
        goals=goals(alone.ttft_ms(0.99), beside.ttft_ms(0.99), beside.tokens_per_s["batch"])
        if others != "all room"
        else {},
    )


def _rate(tenant: str, load: float, needs: Needs) -> float:
    """The requests per second that are this part of the capacity."""
    return load * _FLEET.all_slots / needs[tenant].slot_s


async def _under(urls: Sequence[str], needs: Needs, loads: Mapping[str, float], seconds: float) -> _Seen:
    """Measures under these loads, which are parts of the capacity."""
    load = Load(TENANTS, urls, streams=True)
    async with asyncio.TaskGroup() as tasks:
        asking = [load.offer(each, _rate(each.name, loads[each.name], needs)) for each in TENANTS if each.name in loads]
        with running(tasks, asking):
            await asyncio.sleep(_WARM_UP_S)
            load.count_from_now()
            idle = IdleShare()
            await asyncio.sleep(seconds)
            tokens = {each.name: sum(sent.output_tokens for sent in load.of(each.name)) for each in TENANTS}
            ttft_s = [each.ttft_s for each in load.of("realtime")]
            seen = _Seen(ttft_s, per_s(tokens, seconds), dict(load.failed), idle())
    load.close()
    return seen


def table(rows: Sequence[Row]) -> Table:
    drawn = tables.table(
        f"Priorities: realtime asks for {OWN_LOAD:g} of the capacity, and others for the rest of the load",
        ("beside it",),
        (
            "gateways",
            "load",
            "alone p50, p99 ms",
            "beside p50, p99 ms",
            "p99 ratio",
            "batch tokens/s",
            "failed",
            "idle",
            "goal",
        ),
        caption=f"goal: TTFT p99 of realtime at most {MOST_TTFT_RATIO} times that alone, and batch goes on",
    )
    for row in rows:
        if isinstance(row, PrioritiesRow):
            drawn.add_row(
                row.others,
                str(row.gateways),
                f"{row.factor:g}",
                f"{row.alone_ttft_p50_ms:.0f}, {row.alone_ttft_p99_ms:.0f}",
                f"{row.ttft_p50_ms:.0f}, {row.ttft_p99_ms:.0f}",
                f"{row.ratio:.2f}",
                f"{row.tokens_per_s['batch']:.0f}",
                str(sum(row.failed.values())),
                f"{row.idle:.0%}",
                row.verdict,
            )
    return drawn
