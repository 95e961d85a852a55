"""How fairly tenants share replicas that have less room than they ask for.

    python -m bench.fairness [--gateways 1,2,4,8] [--seconds 20] [--no-queue] [--out FILE]

Three simulated replicas take 8 requests each. Three tenants ask without a pause: `many` with 200 clients, all of them
through one gateway; `few` and `double` with 20 clients each, through all gateways. `double` has the weight 2. The
tenants' prompts and answers are of different lengths.

Jain's index is over what each tenant used, divided by its weight: the prompt tokens that no cache had, and two times
the tokens of its answers, of requests that ended in the time that counts. 1 means equal, 0.33 that one of three got
everything. `most` is the largest number of requests that Redis ever showed for one replica.

With --no-queue, gateways have no limit, so engines queue, first come first served.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count as numbers
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.cluster import Cluster, running_cluster
from bench.embedded import connect
from bench.options import count, counts
from coordinator.keys import PoolKeys

_SLOTS = 8
_REPLICA_ARGUMENTS = ("--speed", "5", "--decode-s-per-token", "0.1")
_WARM_UP_S = 5.0
_OUTPUT_WEIGHT = 2


@dataclass(frozen=True)
class Tenant:
    """One tenant's load."""

    name: str
    weight: int
    clients: int
    words: int
    output_tokens: int


TENANTS = (Tenant("many", 1, 200, 300, 30), Tenant("few", 1, 20, 900, 60), Tenant("double", 2, 20, 300, 60))


@dataclass(frozen=True)
class Row:
    """One run."""

    gateways: int
    has_queue: bool
    jain: float
    requests_per_s: float
    failed: dict[str, int]
    """By status and code."""
    most: int
    shares: dict[str, float]
    """What each tenant used, of everything."""
    p50_s: dict[str, float]
    """The median time of a request, by tenant."""


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


class Run:
    """Clients of all tenants on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = numbers()
        self._dice = random.Random(1)
        self.used: Counter[str] = Counter()
        self.took_s: dict[str, list[float]] = {tenant.name: [] for tenant in TENANTS}
        self.failed: Counter[str] = Counter()
        self.most = 0
        self._is_over = False

    async def client(self, tenant: Tenant, http: httpx.AsyncClient) -> None:
        """Asks without a pause until it is cancelled."""
        urls = self._cluster.gateway_urls[:1] if tenant.name == "many" else self._cluster.gateway_urls
        while True:
            number, began_s = next(self._numbers), time.monotonic()
            text = f"{number} " + " ".join(self._dice.choice(("stone", "river", "paper")) for _ in range(tenant.words))
            body = {
                "model": "sim",
                "max_tokens": tenant.output_tokens,
                "ignore_eos": True,
                "messages": [{"role": "user", "content": text}],
            }
            answer = await http.post(f"{self._dice.choice(urls)}/v1/chat/completions", json=body)
            if answer.status_code != 200:
                self.failed[f"{answer.status_code} {answer.json()['error']['code']}"] += 1
                await asyncio.sleep(0.1)
                continue
            usage = answer.json()["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self.used[tenant.name] += usage["prompt_tokens"] - cached + _OUTPUT_WEIGHT * usage["completion_tokens"]
            self.took_s[tenant.name].append(time.monotonic() - began_s)

    async def watch(self) -> None:
        """Notes the most requests on one replica, as Redis shows them, until the run is over."""
        wire = await connect(self._cluster.redis_url)
        while not self._is_over:
            active = await wire.send("HVALS", PoolKeys(self._cluster.pool).active)
            self.most = max([self.most, *map(int, active)])
            await asyncio.sleep(0.01)
        await wire.close("the run is over")

    def forget(self) -> None:
        """Begin to count."""
        self.used.clear()
        self.took_s = {name: [] for name in self.took_s}

    async def measure(self, seconds: float) -> None:
        limits = httpx.Limits(max_connections=None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.watch())
            running, clients = [], []
            for tenant in TENANTS:
                headers = {"authorization": f"Bearer {tenant.name}"}
                http = httpx.AsyncClient(headers=headers, timeout=120, limits=limits, trust_env=False)
                clients.append(http)
                running += [tasks.create_task(self.client(tenant, http)) for _ in range(tenant.clients)]
            await asyncio.sleep(_WARM_UP_S)
            self.forget()
            await asyncio.sleep(seconds)
            self._is_over = True
            for task in running:
                task.cancel()
        for http in clients:
            await http.aclose()


def config(has_queue: bool) -> dict[str, Any]:
    keys = [
        {"name": each.name, "tenant": each.name, "sha256": hashlib.sha256(each.name.encode()).hexdigest()}
        for each in TENANTS
    ]
    queue = {"policy": {"max_active_requests": _SLOTS}} if has_queue else {"queue": {"max_wait_s": 0}}
    return {
        "redis": {"budget_ms": 200},
        "tenants": [{"name": each.name, "weight": each.weight} for each in TENANTS],
        "security": {"share_cache": True, "api_keys": keys},
    } | queue


def measured(gateways: int, seconds: float, has_queue: bool) -> Row:
    with running_cluster(gateways=gateways, replica_arguments=_REPLICA_ARGUMENTS, config=config(has_queue)) as cluster:
        run = Run(cluster)
        asyncio.run(run.measure(seconds))
    total = sum(run.used.values())
    return Row(
        gateways,
        has_queue,
        round(jain([run.used[each.name] / each.weight for each in TENANTS]), 4),
        round(sum(map(len, run.took_s.values())) / seconds, 2),
        dict(run.failed),
        run.most,
        {each.name: round(run.used[each.name] / total, 3) for each in TENANTS},
        {name: round(sorted(times)[len(times) // 2], 2) if times else 0.0 for name, times in run.took_s.items()},
    )


def table(rows: Sequence[Row]) -> Table:
    names = [f"{each.name}: share, p50" for each in TENANTS]
    drawn = tables.table(
        "Three tenants that ask for more than there is (weights 1, 1, 2)",
        (),
        ("gateways", "queue", "Jain", *names, "requests/s", "failed", "most on a replica"),
    )
    for row in rows:
        cells = [f"{100 * row.shares[each.name]:.1f}%, {row.p50_s[each.name]:.1f} s" for each in TENANTS]
        figures = f"{row.requests_per_s:.1f}", str(row.failed or 0), str(row.most)
        drawn.add_row(str(row.gateways), "yes" if row.has_queue else "no", f"{row.jain:.3f}", *cells, *figures)
    return drawn


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.fairness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gateways", type=counts, default="1,2,4,8", help="default: %(default)s")
    parser.add_argument("--seconds", type=count, default=20, help="that count, in each run (default: %(default)s)")
    parser.add_argument("--no-queue", action="store_true", help="the engines' queues only")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = [measured(gateways, options.seconds, not options.no_queue) for gateways in options.gateways]
    Console(width=160).print(table(rows))
    record.write(options.out, [asdict(row) for row in rows], {})


if __name__ == "__main__":
    main()
