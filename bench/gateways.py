"""Do N gateways route as one?

The same requests through 1, 2, 4 and 8 gateways behind a random spreader, against requests pinned perfectly to the
replicas, and round_robin for what it is without. The replicas' caches hold all contexts once, not everywhere.

    python -m bench.gateways [--requests 2000] [--gateways 1,2,4,8] [--runs 3] [--out FILE]

Of several runs, each on a workload and a cluster of its own, the median of each figure is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.cluster import Cluster, running_cluster
from bench.load import Result, pinned_spread, random_spread, run
from bench.workloads import Session, shared_contexts

REPLICAS = 3
CONCURRENCY = 12
# 24 contexts of about 3 000 and 1 600 tokens: 64k tokens in all. One replica holds 32k of them, the three 96k.
REPLICA_ARGUMENTS = ("--speed", "4", "--num-gpu-blocks", "2048")


@dataclass(frozen=True)
class Row:
    """One run."""

    name: str
    gateways: int
    policy: str
    requests: int
    failed: int
    cache_share: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    requests_per_s: float
    busiest_share: float
    """The share of requests that the busiest replica served."""
    cache_shares: list[float]
    """Of each run."""


@contextmanager
def cluster_of(gateways: int, policy: str = "prefix_kv_aware") -> Iterator[Cluster]:
    """The experiment's cluster."""
    with running_cluster(
        gateways=gateways, replicas=REPLICAS, replica_arguments=REPLICA_ARGUMENTS, policy=policy
    ) as cluster:
        yield cluster


def measure(gateways: int, policy: str, warm_up: list[Session], requests: list[Session]) -> Result:
    """One run on a cluster of its own; `gateways` 0 pins requests to the replicas, past every gateway."""
    with cluster_of(max(1, gateways), policy) as cluster:
        replicas = [replica.url for replica in cluster.replicas]
        spread = random_spread(cluster.gateway_urls, seed=gateways) if gateways else pinned_spread(replicas)
        asyncio.run(run(warm_up, spread, CONCURRENCY))
        return asyncio.run(run(requests, spread, CONCURRENCY))


def _row(name: str, gateways: int, policy: str, results: list[Result]) -> Row:
    return Row(
        name,
        gateways,
        policy,
        sum(result.requests for result in results),
        sum(result.failed for result in results),
        median(result.cache_share for result in results),
        median(result.percentile_ttft_s(0.5) for result in results) * 1000,
        median(result.percentile_ttft_s(0.95) for result in results) * 1000,
        median(result.requests / result.wall_s for result in results),
        median(max(result.by_replica.values()) / result.requests for result in results),
        [result.cache_share for result in results],
    )


def _table(rows: list[Row]) -> Table:
    table = Table(title="Share of prompt tokens served from cache, and TTFT, by number of gateways")
    for column in ("run", "cached", "of pinned", "p50", "p95", "req/s", "failed", "busiest"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    pinned = rows[0].cache_share
    for row in rows:
        table.add_row(
            row.name,
            f"{row.cache_share:.4f}",
            f"{row.cache_share / pinned:.3f}",
            f"{row.ttft_p50_ms:.0f} ms",
            f"{row.ttft_p95_ms:.0f} ms",
            f"{row.requests_per_s:.0f}",
            str(row.failed),
            f"{row.busiest_share:.0%}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateways", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="requests measured in each run")
    parser.add_argument("--warm-up", type=int, default=600, help="requests sent before, not measured")
    parser.add_argument("--gateways", default="1,2,4,8", help="numbers of gateways, comma separated")
    parser.add_argument("--runs", type=int, default=1, help="runs of each, on seeds of their own")
    parser.add_argument("--seed", type=int, default=1, help="the first run's seed")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    counts = [int(count) for count in options.gateways.split(",")]
    plan = [("perfect pinning", 0, "round_robin")]
    plan += [(f"{n} gateway{'s' if n > 1 else ''}", n, "prefix_kv_aware") for n in counts]
    plan += [(f"{max(counts)}, round_robin", max(counts), "round_robin")]
    console = Console()
    rows = []
    for name, gateways, policy in plan:
        results = []
        for run_index in range(options.runs):
            requests = shared_contexts(options.warm_up + options.requests, seed=options.seed + run_index)
            with console.status(f"{name}, run {run_index + 1} of {options.runs}"):
                results.append(measure(gateways, policy, requests[: options.warm_up], requests[options.warm_up :]))
        rows.append(_row(name, gateways, policy, results))
        console.print(f"{name}: " + ", ".join(f"{share:.4f}" for share in rows[-1].cache_shares))
    console.print(_table(rows))
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
