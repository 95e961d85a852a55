"""What replicas can do, and the rates of tenants that are so many times as much.

A request holds one of a replica's slots for as many steps as its answer has tokens. So the replicas' capacity is their
slots, and a load is the rate of each tenant times the time that its requests hold a slot. These times are measured
without a gateway, on replicas that always have requests waiting: two clients for each slot send one request after the
other.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import fmean

from bench.cluster import SimReplica, running_replicas
from bench.fairness.fleet import Fleet
from bench.fairness.load import Load, Sent, running
from bench.fairness.tenants import Tenant

_WARM_UP_S = 4.0
_CLIENTS_PER_SLOT = 2


@dataclass(frozen=True)
class Need:
    """What one request of a tenant takes."""

    slot_s: float
    charge_tokens: float


Needs = Mapping[str, Need]
"""By tenant."""
Rates = Mapping[str, float]
"""Requests per second, by tenant."""


def measured_needs(fleet: Fleet, tenants: Sequence[Tenant], seconds: float) -> Needs:
    """What requests of these tenants take on full replicas."""
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-bench-") as folder,
        running_replicas(Path(folder), fleet.replicas, fleet.arguments) as replicas,
    ):
        return asyncio.run(_measure(fleet, replicas, tenants, seconds))


async def _measure(fleet: Fleet, replicas: Sequence[SimReplica], tenants: Sequence[Tenant], seconds: float) -> Needs:
    load = Load(tenants, [replica.url for replica in replicas], streams=True)
    by_weight = list(chain.from_iterable([each] * each.weight for each in tenants))
    async with asyncio.TaskGroup() as tasks:
        asking = [
            load.keep_asking(tenant, replica.url)
            for replica in replicas
            for tenant in islice(cycle(by_weight), _CLIENTS_PER_SLOT * fleet.slots)
        ]
        with running(tasks, asking):
            await asyncio.sleep(_WARM_UP_S)
            load.count_from_now()
            await asyncio.sleep(seconds)
    load.close()
    return {each.name: need(load.of(each.name)) for each in tenants}


def need(sent: Sequence[Sent]) -> Need:
    """What the requests of one tenant took. The first step of a request takes as long as its others, on average."""
    slots_s = [(each.ended_s - each.first_byte_s) * each.output_tokens / (each.output_tokens - 1) for each in sent]
    return Need(fmean(slots_s), fmean(each.charge_tokens for each in sent))


def slots_used(rates: Rates, needs: Needs) -> float:
    """How many slots these rates hold on average, if there are enough."""
    return sum(rate * needs[name].slot_s for name, rate in rates.items())


def fair_rates(tenants: Sequence[Tenant], needs: Needs, slots: int) -> dict[str, float]:
    """The rates that use all slots and charge each tenant in proportion to its weight."""
    rates = {each.name: each.weight / needs[each.name].charge_tokens for each in tenants}
    scale = slots / slots_used(rates, needs)
    return {name: scale * rate for name, rate in rates.items()}


def greedy_rates(
    tenants: Sequence[Tenant], needs: Needs, slots: int, greedy: str, factor: float, more_than_fair: float
) -> dict[str, float]:
    """Rates that need `factor` times the slots. All tenants but the greedy one ask for `more_than_fair` times their
    share, and the greedy one for all the rest. Raises ValueError if it would have less than its share."""
    fair = fair_rates(tenants, needs, slots)
    rates = {name: rate * more_than_fair for name, rate in fair.items() if name != greedy}
    rates[greedy] = (factor * slots - slots_used(rates, needs)) / needs[greedy].slot_s
    if rates[greedy] < fair[greedy]:
        raise ValueError(f"with {factor:g} times the capacity, {greedy} would ask for less than its share")
    return rates
