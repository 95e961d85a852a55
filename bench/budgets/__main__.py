"""Tries to overspend budgets through many gateways that die, and measures what a budget costs Redis.

    python -m bench.budgets [--gateways 8] [--tenants 20] [--clients 4] [--modes calm,kills,emptied] [--out FILE]

Each tenant has a budget in money that pays for 50 to 200 requests, and clients that ask random gateways until it is
used up. They hang up now and then and ask the same again, and so they do when a gateway breaks their stream off. In
the end, each tenant asks with the smallest requests until its budget is used up. The modes:

calm       only that
kills      gateways are killed (SIGKILL) one after another, one each --kill-each-s, and started again
emptied    the same, and Redis is emptied (FLUSHALL) when tenants have spent half of their budgets

What is told of each mode, in average requests and in parts of all budgets:

overspent       what clients were served, by the usage in their streams and the price, beyond the budget; beside the
                most that a tenant had in flight. Goal: no budget is overspent by more than that
false refusals  answers 429 budget_exceeded while more was left than the request can cost. Goal: 0. What engines
                computed for streams that broke off is spent, as if their clients had hung up. Beside them, how many
                these are if only what was served counts (refused_by_served)
not explained   those of them for which all that clients cannot see is still too little: the most that requests in
                flight, and requests that broke off or whose clients hung up, can have cost
most left       at a false refusal; and in the end, by what Redis has as spent
charged         what Redis has as spent in the end, beside what clients were served

Then requests are placed and settled on one pool in turns: with no budget, one, and two, with much or little left of
them. It tells the time of scripts (`place`, `settle` and `spend`, INFO commandstats) and Redis' CPU time, with the
sockets. Turns are compared with the turn without budgets of the same round; the medians are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from hashlib import sha256
from itertools import count as numbers
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from bench import record, tables
from bench.budgets.clients import INPUT, OUTPUT, WORTH, Clients, Tenant
from bench.budgets.cost import cost
from bench.cluster import Cluster, Daemon, running_cluster
from bench.embedded import connect, embedded_redis, redis_version
from bench.load import MODEL
from bench.options import count, counts, names, positive
from coordinator.keys import PoolKeys

MODES = ("calm", "kills", "emptied")
GOAL = 1.05
"""Of Redis' time for a request."""
_REPLICAS = ("--decode-s-per-token", "0.03")
_QUIET_S = 120.0
"""Within this time each budget must be used up when nobody kills gateways any more."""


def _config(tenants: list[Tenant]) -> dict[str, Any]:
    budgets = {each.name: [{"per": "month", "money": each.budget / 1e9}] for each in tenants}
    keys = {name: sha256(name.encode()).hexdigest() for name in budgets}
    price = {"model": MODEL, "uncached_input_per_mtok": INPUT / 1000, "output_per_mtok": OUTPUT / 1000}
    return {
        "redis": {"budget_ms": 200},  # this machine also runs the clients and the engines
        "billing": {"prices": [price]},
        "tenants": [{"name": name, "budgets": each} for name, each in budgets.items()],
        "security": {
            "share_cache": True,
            "api_keys": [{"name": n, "tenant": n, "admin": True, "sha256": key} for n, key in keys.items()],
        },
    }


async def _kills(cluster: Cluster, each_s: float, faults: Counter[str]) -> None:
    """Kills a gateway every so many seconds, and starts it again, until it is cancelled."""
    for number in numbers():
        await asyncio.sleep(each_s)
        await asyncio.to_thread(_kill, cluster.gateway_processes[number % len(cluster.gateways)])  # clients go on
        faults["killed"] += 1


def _kill(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


async def _empties(redis_url: str, clients: Clients, faults: Counter[str]) -> None:
    await clients.spent_half.wait()
    wire = await connect(redis_url)
    await wire.send("FLUSHALL")
    await wire.close()
    faults["emptied"] += 1


async def _overspend(cluster: Cluster, tenants: list[Tenant], options: argparse.Namespace, mode: str) -> Counter[str]:
    """Lets all clients spend, breaks things meanwhile, and returns how many there were of each fault."""
    faults: Counter[str] = Counter()
    timeout, connector = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        clients = Clients(cluster, tenants, http)
        async with asyncio.TaskGroup() as faulty:
            running = []
            if mode != "calm":
                running.append(faulty.create_task(_kills(cluster, options.kill_each_s, faults)))
            if mode == "emptied":
                running.append(faulty.create_task(_empties(cluster.redis_url, clients, faults)))
            await asyncio.gather(*(clients.spend(each) for each in tenants for _ in range(options.clients)))
            for task in running:
                task.cancel()
        async with asyncio.timeout(_QUIET_S):
            await asyncio.gather(*(clients.finish(each) for each in tenants))
    wire = await connect(cluster.redis_url)
    spending = PoolKeys(cluster.pool).spending
    fields, amounts = await wire.send("HKEYS", spending), await wire.send("HVALS", spending)
    await wire.close()
    charged = {
        name.decode().rpartition("/")[2]: int(nanos)
        for name, nanos in zip(fields, amounts, strict=True)
        if name.startswith(b"settled ")
    }
    for tenant in tenants:
        tenant.charged = charged[tenant.name]
    return faults


def overspend(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One mode, on a cluster of its own. Amounts are in average requests, shares are of all budgets."""
    dice = random.Random(2)
    all_of = [Tenant(f"tenant-{n}", dice.randint(*options.worth) * WORTH) for n in range(options.tenants)]
    with running_cluster(
        gateways=options.gateways, replica_arguments=_REPLICAS, events=False, config=_config(all_of)
    ) as cluster:
        faults = asyncio.run(_overspend(cluster, all_of, options, mode))
    total = sum(each.budget for each in all_of)
    return {
        "mode": mode,
        "faults": faults,
        "outcomes": sum((each.outcomes for each in all_of), Counter()),
        "overspent": sum(each.over > 0 for each in all_of),
        "most_overspent": max(0, *(each.over for each in all_of)) / WORTH,
        "beyond_in_flight": sum(each.over > each.most_in_flight for each in all_of),
        "most_in_flight": max(each.most_in_flight for each in all_of) / WORTH,
        "refused_by_served": sum(each.refused_by_served for each in all_of),
        "false_refusals": sum(each.false_refusals for each in all_of),
        "not_explained": sum(each.not_explained for each in all_of),
        "most_left": max(each.most_left for each in all_of),
        "most_left_in_redis": max(each.budget - each.charged for each in all_of) / WORTH,
        "served_share": sum(each.served for each in all_of) / total,
        "computed_share": sum(each.served + each.computed for each in all_of) / total,
        "charged_share": sum(each.charged for each in all_of) / total,
        "tenants": [vars(each) for each in all_of],
    }


def show(spent: list[dict[str, Any]], costs: list[dict[str, Any]]) -> None:
    for row in spent:
        for name, value in row.items():
            if name != "tenants":
                Console().print(f"{name:18} {dict(value) if isinstance(value, Counter) else value}")
    drawn = tables.table("Redis' time of a request", (), list(costs[0]), caption=f"goal: cpu_ratio at most {GOAL}")
    for row in costs:
        drawn.add_row(
            *(value if name == "left" else f"{value:.{3 if 'ratio' in name else 0}f}" for name, value in row.items())
        )
    Console().print(drawn)


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.budgets", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, kind, default, what in (
        ("modes", names(MODES), "calm,kills,emptied", "which of them"),
        ("gateways", count, "8", "of the cluster"),
        ("tenants", count, "20", "each with a budget"),
        ("clients", count, "4", "of each tenant"),
        ("worth", counts, "50,200", "the fewest and the most requests that a budget pays for"),
        ("kill-each-s", positive, "2", "seconds from one kill to the next"),
        ("replicas", counts, "3,8,64", "of the pools on which the cost is measured"),
        ("requests", count, "40", "of a turn"),
        ("rounds", count, "60", "of turns"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{what} (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    spent = [overspend(mode, options) for mode in options.modes]
    with embedded_redis() as url:
        version = asyncio.run(redis_version(url))
        costs = [row for n in options.replicas for row in asyncio.run(cost(url, n, options.requests, options.rounds))]
    show(spent, costs)
    record.write(options.out, costs, {"redis": version}, modes=spent)


if __name__ == "__main__":
    main()
