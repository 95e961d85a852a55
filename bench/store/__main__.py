"""The capacity of one Redis as the store of all gateways: placements/s, other work, the map's size.

    python -m bench.store [--quick] [--keys 1000000] [--seconds 10] [--out FILE]

Every figure is measured on its own fresh Redis. Gateways, agents and clients that move values run in other processes.
If the machine has fewer cores than these processes, they take time from each other. The table shows how much of a core
Redis used, and how long it waited for one. If it waited long, the machine caused the slowest times, not Redis.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench import record, tables
from bench.embedded import embedded_redis, redis_version
from bench.options import count, positive
from bench.store import latency, memory, saturation
from bench.store.latency import Latency
from bench.store.memory import Memory
from bench.store.requests import CHAIN_KEYS
from bench.store.saturation import Saturation

SMALL_KEYS = 10_000
_QUICK = {"keys": 100_000, "seconds": 2.0}
_UNITS = {
    "transitions_per_s": "transitions/s",
    "delay_p99_ms": "ms late (p99)",
    "mb_per_s": "MB/s",
    "evictions_per_s": "evictions/s",
}


class Runs:
    """All measurements, one after another, and the progress bar."""

    def __init__(self, options: argparse.Namespace, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        maps = [("claim", SMALL_KEYS), ("resident", SMALL_KEYS), ("resident", options.keys)]
        self._maps = [(kind, min(keys, options.keys)) for kind, keys in maps]
        self._task = progress.add_task("", total=1 + len(latency.CASES) + len(self._maps))

    def saturation(self) -> Saturation:
        """Placements/s of gateways that send without a pause."""
        with self._step(f"{self._options.gateways} gateways at saturation") as url:
            return uvloop.run(saturation.saturate(url, self._options.gateways, self._options.seconds))

    def latencies(self) -> list[Latency]:
        """Placements beside each kind of other work."""
        return [self._latency(case) for case in latency.CASES]

    def _latency(self, case: latency.Case) -> Latency:
        with self._step(f"{self._options.rate:g} placements/s beside {case.beside}") as url:
            return uvloop.run(latency.measure(url, case, self._options.rate, self._options.seconds))

    def memories(self) -> list[Memory]:
        """Maps of either kind of record, small and large."""
        return [self._memory(kind, keys) for kind, keys in self._maps]

    def _memory(self, kind: str, keys: int) -> Memory:
        calls = min(self._options.calls, keys)
        filling = self._progress.add_task(f"  {keys} keys", total=keys)
        with self._step(f"a map of {keys} keys ({kind})") as url:
            found = uvloop.run(
                memory.measure(url, kind, keys, calls, lambda count: self._progress.advance(filling, count))
            )
        self._progress.remove_task(filling)
        return found

    @contextmanager
    def _step(self, text: str) -> Iterator[str]:
        self._progress.update(self._task, description=text)
        with embedded_redis() as url:
            yield url
        self._progress.advance(self._task)


def _saturation_table(found: Saturation, gateway_per_s: float) -> Table:
    title = f"At saturation: {saturation.REPLICAS} replicas, {CHAIN_KEYS} keys, 1 in 10 partly new"
    table = Table(title=title, show_header=False)
    worth = f"a gateway at saturation makes {gateway_per_s:g}/s: worth"
    for name, value in (
        (f"placements of {found.gateways} gateways", f"{found.placements_per_s:.0f}/s"),
        ("of a core, Redis used", f"{found.redis.cpu_share:.0%}"),
        ("and waited for one", f"{found.redis.waiting_share:.0%}"),
        ("and the busiest gateway used", f"{found.gateway_cpu_share:.0%}"),
        ("Redis' CPU for one, with its settles and holds", f"{found.redis_us:.0f} us"),
        (worth, f"{found.placements_per_s / gateway_per_s:.1f} gateways"),
        ("of a Redis with a core for itself", f"{found.ceiling_per_s:.0f}/s"),
        ("worth", f"{found.ceiling_per_s / gateway_per_s:.1f} gateways"),
    ):
        table.add_row(name, value)
    return table


def _latency_table(rows: list[Latency]) -> Table:
    title = f"One placement at {rows[0].rate_per_s:g}/s, beside other work on the same Redis"
    table = tables.table(title, ("beside", "which did"), ("p50 ms", "p99 ms", "max ms", "Redis", "waits"))
    for row in rows:
        table.add_row(
            row.beside,
            "\n".join(f"{value:.0f} {_UNITS[name]}" for name, value in row.did.items()),
            *(f"{us / 1000:.2f}" for us in (row.p50_us, row.p99_us, row.max_us)),
            f"{row.redis.cpu_share:.0%}",
            f"{row.redis.waiting_share:.0%}",
        )
    return table


def _memory_table(rows: list[Memory]) -> Table:
    title = f"The map: {memory.REPLICAS} replicas, each key owned once, placements of what is in it"
    columns = ("keys", "records", "kept as", "used", "a key", "script", "round-trip p50", "p99")
    table = tables.table(title, (), columns)
    for row in rows:
        table.add_row(
            f"{row.keys:,}",
            row.kind,
            row.encoding,
            f"{row.used_bytes / 1e6:.0f} MB",
            f"{row.bytes_per_key:.0f} B",
            f"{row.times.script_us:.0f} us",
            f"{row.times.round_trip_p50_us:.0f} us",
            f"{row.times.round_trip_p99_us:.0f} us",
        )
    return table


def _flat(what: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Flattens nested figures into one row. The new names join both names."""
    row: dict[str, Any] = {"what": what}
    for name, value in figures.items():
        row |= {f"{name}_{each}": one for each, one in value.items()} if isinstance(value, dict) else {name: value}
    return row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=positive, default=10.0, help="time of a measurement (default: %(default)s)")
    parser.add_argument(
        "--gateways", type=count, default=2, help="processes that saturate Redis (default: %(default)s)"
    )
    parser.add_argument(
        "--gateway-per-s",
        type=positive,
        default=3000.0,
        help="placements/s of a gateway at saturation: its requests/s in bench.overhead (default: %(default)s)",
    )
    parser.add_argument("--rate", type=positive, default=500.0, help="placements/s of latencies (default: %(default)s)")
    parser.add_argument("--keys", type=count, default=1_000_000, help="keys of the large map (default: %(default)s)")
    parser.add_argument("--calls", type=count, default=1000, help="placements with each map (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few seconds each, and a map of 100000 keys")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    if options.quick:
        parser.set_defaults(**_QUICK)
        options = parser.parse_args()
    return options


def main() -> None:
    record.begin()
    options, console = _options(), Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        runs = Runs(options, progress)
        saturated, latencies, memories = runs.saturation(), runs.latencies(), runs.memories()
    console.print(_saturation_table(saturated, options.gateway_per_s))
    console.print(_latency_table(latencies))
    console.print(_memory_table(memories))
    console.print(f"On {os.cpu_count()} cores, which Redis shares with all who ask it.")
    with embedded_redis() as url:
        versions = {"redis": uvloop.run(redis_version(url))}
    rows = [_flat("saturation", saturated.as_dict(options.gateway_per_s))]
    rows += [_flat("latency", asdict(row)) for row in latencies]
    rows += [_flat("memory", asdict(row)) for row in memories]
    record.write(options.out, rows, versions)


if __name__ == "__main__":
    main()
