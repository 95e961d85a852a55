"""How often is the map right, and what does that gain?

Runs simulated replicas whose caches hold only a part of the working set, with KV events and without. It measures how
often a placement predicted wrongly, the cached tokens, the time to the first token, and the cost of the events: bytes
in the streams and in Redis, and the time from an engine's event to the map.

    python -m bench.truth [--requests 1500] [--pressure 1.5,2.5,4] [--out FILE]

A prediction is wrong if the engine's cached tokens are at least a block below the matched key, or above the chain's
next key. The replicas run in scaled time (see --speed), so compare times only within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.cluster import Cluster, running_cluster
from bench.load import BLOCK_TOKENS, Result, random_spread, run
from bench.options import amounts, count, positive
from bench.workloads import Session, shared_contexts
from coordinator.keys import PoolKeys
from coordinator.redis.wire import Wire

GATEWAYS = 2
REPLICAS = 3
CONCURRENCY = 12
BLOCKS = 4096
CAPACITY_TOKENS = REPLICAS * BLOCKS * BLOCK_TOKENS
# Small beside a replica's cache, as in production: running requests hold only a part of the blocks.
_DOCUMENT_BYTES = 4_000
_DOCUMENT_TOKENS = 1_030
_IMAGE_SIDE = 256
_IMAGE_TOKENS = 500
_IMAGE_SHARE = 0.2
_CAUSE = re.compile(r'^kvgate_wrong_predictions_total\{cause="(\w+)",.*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One run. Without events, the cost of the streams is 0."""

    pressure: float
    events: bool
    requests: int
    failed: int
    over_share: float
    under_share: float
    cache_share: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    stream_bytes_per_request: float
    transitions_per_request: float
    bytes_per_key: float
    lag_p50_ms: float
    lag_p99_ms: float
    causes: dict[str, float]
    """Wrong predictions by cause, as the gateways count them."""


@dataclass(frozen=True)
class Cost:
    """The cost of the events and the map."""

    stream_bytes: float = 0.0
    transitions: float = 0.0
    bytes_per_key: float = 0.0
    lag_p50_ms: float = 0.0
    lag_p99_ms: float = 0.0
    causes: dict[str, float] = field(default_factory=dict)


def workload(requests: int, pressure: float, seed: int) -> list[Session]:
    """Questions about documents and images. Together these are `pressure` times as large as the caches."""
    tokens = pressure * CAPACITY_TOKENS
    return shared_contexts(
        requests,
        seed=seed,
        documents=round((1 - _IMAGE_SHARE) * tokens / _DOCUMENT_TOKENS),
        images=round(_IMAGE_SHARE * tokens / _IMAGE_TOKENS),
        document_bytes=_DOCUMENT_BYTES,
        side=_IMAGE_SIDE,
    )


def measure(pressure: float, events: bool, requests: int, seed: int, speed: float) -> Row:
    """One run on its own cluster, after a warm-up that fills the caches."""
    arguments = ("--speed", str(speed), "--num-gpu-blocks", str(BLOCKS), "--events" if events else "--no-events")
    asked = workload(requests + requests // 3, pressure, seed)
    with running_cluster(gateways=GATEWAYS, replicas=REPLICAS, replica_arguments=arguments) as cluster:
        spread = random_spread(cluster.gateway_urls, seed)
        asyncio.run(run(asked[: requests // 3], spread, CONCURRENCY))
        before = asyncio.run(_cost(cluster))
        result = asyncio.run(run(asked[requests // 3 :], spread, CONCURRENCY))
        after = asyncio.run(_cost(cluster))
    return _row(pressure, events, result, before, after)


def _row(pressure: float, events: bool, result: Result, before: Cost, after: Cost) -> Row:
    answered = max(1, result.requests)
    return Row(
        pressure=pressure,
        events=events,
        requests=result.requests,
        failed=result.failed,
        over_share=result.over / max(1, result.predicted),
        under_share=result.under / max(1, result.predicted),
        cache_share=result.cache_share,
        ttft_p50_ms=result.percentile_ttft_s(0.5) * 1000,
        ttft_p95_ms=result.percentile_ttft_s(0.95) * 1000,
        ttft_p99_ms=result.percentile_ttft_s(0.99) * 1000,
        stream_bytes_per_request=(after.stream_bytes - before.stream_bytes) / answered,
        transitions_per_request=(after.transitions - before.transitions) / answered,
        bytes_per_key=after.bytes_per_key,
        lag_p50_ms=after.lag_p50_ms,
        lag_p99_ms=after.lag_p99_ms,
        causes={cause: count - before.causes.get(cause, 0.0) for cause, count in after.causes.items()},
    )


async def _cost(cluster: Cluster) -> Cost:
    """The bytes published until now, and the bytes of a resident key in Redis."""
    keys = PoolKeys(cluster.pool)
    wire = await Wire.open(cluster.redis_url, 2.0, lambda _error: None)
    try:
        stream_bytes, key_bytes, count, delays_ms = 0.0, 0.0, 0, list[int]()
        for replica in cluster.replicas:
            published = int(await wire.send("HGET", keys.entries, replica.id) or 0)
            kept = int(await wire.send("XLEN", keys.events(replica.id)))
            if kept:
                size = int(await wire.send("MEMORY", "USAGE", keys.events(replica.id), "SAMPLES", 0))
                stream_bytes += published * size / kept
            delays_ms += map(_delay_ms, await wire.send("XRANGE", keys.events(replica.id), "-", "+"))
            held = int(await wire.send("ZCARD", keys.held(replica.id)))
            sample = await wire.send("ZRANGE", keys.held(replica.id), 0, 199)
            records = [int(await wire.send("MEMORY", "USAGE", keys.own(key.decode())) or 0) for key in sample]
            if held and sample:
                set_bytes = int(await wire.send("MEMORY", "USAGE", keys.held(replica.id), "SAMPLES", 0))
                key_bytes += set_bytes + held * sum(records) / len(sample)
                count += held
        delays_ms.sort()
        return await _from_metrics(cluster, stream_bytes, key_bytes / count if count else 0.0, delays_ms)
    finally:
        await wire.close()


def _delay_ms(entry: tuple[bytes, list[bytes]]) -> int:
    """From the oldest event of an entry of a stream to the map: the entry's id is the time when the map was changed."""
    entry_id, flat = entry
    return int(entry_id.split(b"-")[0]) - int(flat[flat.index(b"at_ms") + 1])


async def _from_metrics(cluster: Cluster, stream_bytes: float, bytes_per_key: float, delays_ms: list[int]) -> Cost:
    """Adds the transitions, which each gateway tells, and the causes of all gateways."""
    causes: dict[str, float] = {}
    transitions = 0.0
    async with httpx.AsyncClient(trust_env=False) as http:
        for url in cluster.gateway_urls:
            text = (await http.get(f"{url}/metrics")).text
            told = sum(float(n) for n in re.findall(r"^kvgate_engine_key_transitions\{.*\} (\S+)$", text, re.M))
            transitions = max(transitions, told)
            for cause, count in _CAUSE.findall(text):
                causes[cause] = causes.get(cause, 0.0) + float(count)
    lag_p50_ms, lag_p99_ms = (_percentile(delays_ms, share) for share in (0.5, 0.99))
    return Cost(stream_bytes, transitions, bytes_per_key, lag_p50_ms, lag_p99_ms, causes)


def _percentile(values: list[int], share: float) -> float:
    return float(values[min(len(values) - 1, int(share * len(values)))]) if values else 0.0


def _table(rows: list[Row]) -> Table:
    columns = (
        "set/cache",
        "events",
        "gone",
        "untold",
        "cached",
        "p50",
        "p95",
        "p99",
        "B/req",
        "B/key",
        "lag p50 / p99",
    )
    table = tables.table("Predictions, cache and what the events cost, by working set over cache", (), columns)
    for row in rows:
        table.add_row(
            f"{row.pressure:g}",
            "yes" if row.events else "no",
            f"{row.over_share:.2%}",
            f"{row.under_share:.2%}",
            f"{row.cache_share:.2%}",
            *(f"{ms:.0f} ms" for ms in (row.ttft_p50_ms, row.ttft_p95_ms, row.ttft_p99_ms)),
            f"{row.stream_bytes_per_request:.0f}",
            f"{row.bytes_per_key:.0f}",
            f"{row.lag_p50_ms:.0f} / {row.lag_p99_ms:.0f} ms" if row.events else "-",
        )
    return table


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(prog="python -m bench.truth", description=__doc__)
    parser.add_argument("--requests", type=count, default=1500, help="requests measured in each run")
    parser.add_argument("--pressure", type=amounts, default="1.5,2.5,4", help="working sets in units of all caches")
    parser.add_argument("--seed", type=int, default=1, help="the workload's seed")
    parser.add_argument("--speed", type=positive, default=2.0, help="divides the simulated times")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    console, rows = Console(), []
    for pressure in options.pressure:
        for events in (False, True):
            with console.status(f"working set {pressure:g} times the caches, {'with' if events else 'without'} events"):
                rows.append(measure(pressure, events, options.requests, options.seed, options.speed))
            causes = ", ".join(f"{cause} {count:.0f}" for cause, count in sorted(rows[-1].causes.items()))
            console.print(
                f"{pressure:g} times, {'with' if events else 'without'} events: {rows[-1].failed} failed; "
                f"{rows[-1].transitions_per_request:.1f} transitions a request; wrong by cause: {causes or 'none'}"
            )
    console.print(_table(rows))
    record.write(options.out, [asdict(row) for row in rows], {"kvgate": metadata.version("kvgate")})


if __name__ == "__main__":
    main()
