"""Measures what open pages of the console cost a busy gateway and the store.

A cluster of simulated replicas gets a steady load through one gateway. By turns, no page is open there, and ten are.

    python -m bench.console [--pages 10] [--rate 100] [--rounds 4] [--seconds 10] [--out FILE]

gateway   the part of one core that the gateway uses
commands  that Redis runs in a second, those of scripts included
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import httpx
import orjson
from rich.console import Console

from bench import record, tables
from bench.cluster import Cluster, running_cluster
from bench.embedded import info
from bench.options import count
from bench.overhead.client import Payload, fixed_rate
from bench.trees import cpu_s
from coordinator.redis.wire import Wire

GOAL_SHARE = 0.02
_MESSAGES = [{"role": "user", "content": f"question {Payload.MARK.decode()} " + "and some more words " * 30}]
_BODY = orjson.dumps({"model": "sim", "messages": _MESSAGES, "max_tokens": 4})


@dataclass(frozen=True)
class Row:
    """One turn."""

    pages: int
    requests_per_s: float
    gateway_share: float
    commands_per_s: float


@asynccontextmanager
async def open_pages(url: str, pages: int) -> AsyncIterator[None]:
    """Inside the context, so many read the stream of the console, and its prefixes as often as a page does."""

    async def read(http: httpx.AsyncClient) -> None:
        async with http.stream("GET", f"{url}/console/live") as response:
            async for _ in response.aiter_raw():
                pass

    async def look_at_prefixes(http: httpx.AsyncClient) -> None:
        while True:
            (await http.get(f"{url}/console/prefixes")).raise_for_status()
            await asyncio.sleep(5)

    async with httpx.AsyncClient(timeout=None) as http, asyncio.TaskGroup() as group:
        readers = [group.create_task(each(http)) for _ in range(pages) for each in (read, look_at_prefixes)]
        yield
        for reader in readers:
            reader.cancel()


async def commands_of(store: Wire) -> int:
    return int((await info(store, "stats"))["total_commands_processed"])


async def turn(cluster: Cluster, store: Wire, pages: int, rate: float, seconds: float) -> Row:
    """Measures while so many pages are open."""
    url, pid = cluster.gateway_urls[0], cluster.gateway_processes[0].pid
    async with open_pages(url, pages):
        payload = Payload("/v1/chat/completions", _BODY)
        await fixed_rate([url], payload, rate, 2)
        began_s, cpu_before_s = time.monotonic(), cpu_s([pid])
        commands_before = await commands_of(store)
        answered = (await fixed_rate([url], payload, rate, seconds)).done
        took_s = time.monotonic() - began_s
        commands = await commands_of(store) - commands_before
        return Row(pages, answered / took_s, (cpu_s([pid]) - cpu_before_s) / took_s, commands / took_s)


async def run(options: argparse.Namespace) -> list[Row]:
    with running_cluster(gateways=2, replicas=3, replica_arguments=("--speed", "0")) as cluster:
        store = await Wire.open(cluster.redis_url, 5.0, lambda _error: None)
        try:
            turns = [(0, options.pages) if number % 2 else (options.pages, 0) for number in range(options.rounds)]
            each = [pages for pair in turns for pages in pair]
            return [await turn(cluster, store, pages, options.rate, options.seconds) for pages in each]
        finally:
            await store.close("done")


def differences(rows: list[Row]) -> list[float]:
    """For each pair of turns, by how much the gateway's share is larger with the pages."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [(first.gateway_share - last.gateway_share) * (1 if first.pages else -1) for first, last in pairs]


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.console", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=count, default=10, help="default: %(default)s")
    parser.add_argument("--rate", type=count, default=100, help="requests a second (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=4, help="default: %(default)s")
    parser.add_argument("--seconds", type=count, default=10, help="of each turn (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    more = differences(rows)
    error = f" ± {stdev(more) / sqrt(len(more)):.2%}" if len(more) > 1 else ""
    drawn = tables.table(
        "What open pages of the console cost",
        (),
        ("pages", "requests/s", "gateway", "commands/s"),
        caption=f"more with pages: {mean(more):.2%}{error} of a core; goal: at most {GOAL_SHARE:.0%}",
    )
    for row in rows:
        drawn.add_row(
            str(row.pages), f"{row.requests_per_s:.0f}", f"{row.gateway_share:.1%}", f"{row.commands_per_s:.0f}"
        )
    Console().print(drawn)
    record.write(options.out, [asdict(row) for row in rows], {})


if __name__ == "__main__":
    main()
