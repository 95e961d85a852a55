"""How many placements does the store still decide on a busy machine?

Burners keep each core busy, as engines on CPUs do, while clients send short chats. It prints the share of placements
that fell back, and what was late: Redis, or the gateway itself.

    python -m bench.busy [--busy 0.9] [--clients 24] [--seconds 40] [--beside CHECKOUT] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
from rich.console import Console

from bench import record, tables
from bench.cluster import KVGATE, Cluster, running_gateways, running_replicas
from bench.options import count, positive

GATEWAYS, REPLICAS = 2, 2
_BURNERS = 4
"""Of each core. Each is a session of its own, as a service is: Linux divides a core between sessions first."""
_PERIOD_S = 0.03
"""A burner works for a part of this, and sleeps for the rest."""
_PAUSE_S = 0.05
"""Of a client, between an answer and its next request."""
_DECISIONS = re.compile(r'^kvgate_decisions_total\{.*state="(\w+)".*\} (\S+)$', re.MULTILINE)
_LATE = re.compile(r'^kvgate_store_late_total\{cause="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One run."""

    gateway: str
    busy: float
    placements: int
    fallbacks: int
    late_redis: int
    late_gateway: int

    @property
    def share(self) -> float:
        return self.fallbacks / max(1, self.placements)


def _burn(core: int, busy: float) -> None:
    os.setsid()
    os.sched_setaffinity(0, {core})
    while True:
        until_s = time.thread_time() + busy * _PERIOD_S
        while time.thread_time() < until_s:
            pass
        time.sleep((1 - busy) * _PERIOD_S)  # noqa: TID251 - a process of its own


@contextmanager
def _burning(busy: float) -> Iterator[None]:
    """Keeps each core busy for this part of the time."""
    burners = [
        multiprocessing.get_context("spawn").Process(target=_burn, args=(core, busy / _BURNERS), daemon=True)
        for core in os.sched_getaffinity(0)
        for _ in range(_BURNERS)
    ]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()


async def _load(urls: Sequence[str], clients: int, seconds: float) -> None:
    until_s = time.monotonic() + seconds

    async def client(number: int, http: aiohttp.ClientSession) -> None:
        turn = 0
        while time.monotonic() < until_s:
            turn += 1
            message = {"role": "user", "content": f"{number} " + "context " * 200 + str(turn)}
            body = {"model": "sim", "messages": [message], "max_tokens": 4}
            async with http.post(f"{urls[turn % len(urls)]}/v1/chat/completions", json=body) as answer:
                await answer.read()
            await asyncio.sleep(_PAUSE_S)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(client(number, http) for number in range(clients)))


async def _counts(cluster: Cluster) -> Counter[str]:
    """Placements by state, and late ones by cause, of all gateways."""
    found: Counter[str] = Counter()
    async with aiohttp.ClientSession() as http:
        for url in cluster.gateway_urls:
            async with http.get(f"{url}/metrics") as answer:
                text = await answer.text()
            for name, number in (*_DECISIONS.findall(text), *_LATE.findall(text)):
                found[name] += int(float(number))
    return found


def measure(name: str, kvgate: Sequence[str], sims: dict[str, str], options: argparse.Namespace) -> Row:
    with running_gateways(sims, gateways=GATEWAYS, kvgate=kvgate) as cluster:
        asyncio.run(_load(cluster.gateway_urls, options.clients, 2))
        before = asyncio.run(_counts(cluster))
        with _burning(options.busy):
            asyncio.run(_load(cluster.gateway_urls, options.clients, options.seconds))
        found = asyncio.run(_counts(cluster)) - before
    placements = sum(found[state] for state in ("exact", "degraded", "fallback"))
    return Row(name, options.busy, placements, found["fallback"], found["redis"], found["gateway"])


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.busy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=positive, default=0.9, help="how busy burners keep each core (default: 0.9)")
    parser.add_argument("--clients", type=count, default=24, help="clients at once (default: %(default)s)")
    parser.add_argument("--seconds", type=positive, default=40.0, help="time of each round (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=1, help="rounds (default: %(default)s)")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="measure another KVGate, too, by turns")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    commands: dict[str, Sequence[str]] = {"kvgate": KVGATE}
    if options.beside:
        commands["beside"] = [str(options.beside / ".venv" / "bin" / "kvgate")]
    rows = []
    sized = ("--speed", "20", "--no-events")
    with TemporaryDirectory() as folder, running_replicas(Path(folder), REPLICAS, sized) as sims:
        urls = {sim.id: sim.url for sim in sims}
        for _ in range(options.rounds):
            rows += [measure(name, command, urls, options) for name, command in commands.items()]
    columns = ("gateway", "busy", "placements", "fallbacks", "share", "late: Redis", "late: the gateway")
    table = tables.table("Placements on a busy machine", (), columns)
    for row in rows:
        counted = (row.placements, row.fallbacks, f"{row.share:.2%}", row.late_redis, row.late_gateway)
        table.add_row(row.gateway, f"{row.busy:.0%}", *map(str, counted))
    Console().print(table)
    record.write(options.out, [asdict(row) for row in rows], {"kvgate": metadata.version("kvgate")})


if __name__ == "__main__":
    main()
