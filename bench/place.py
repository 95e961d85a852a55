"""Measures the cost of one placement in Redis, by the number of replicas.

For fleets of several sizes and chains of 10, 40 and 100 keys, it measures the script's own time (Redis' commandstats)
and a client's round trip, one call at a time. Each placement is settled before the next. Replicas have three requests
in flight on average, and full caches. Three in ten are idle: a placement that finds one of these looks no further.
With --least-requests N, each has N requests more.

known    three replicas own the whole chain: another turn of a conversation
shared   every replica owns the first half, as of a system prompt; the rest is new
new      nobody owns any of it

    python -m bench.place [--replicas 8,64,240,1000] [--calls 50] [--rounds 15] [--redis-url URL] [--out FILE]

Without a URL it starts an embedded Redis. `--redis-url` must name a Redis that may be written to; use a separate one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import record, tables
from bench.embedded import CAPACITY_TOKENS, INCARNATION, embedded_redis, info, open_pool, redis_version
from bench.options import count, counts
from coordinator.placement import PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.redis.wire import Wire
from coordinator.subset import Subset

GATEWAY = "bench.0"
TOKENS_PER_KEY = 100
CASES = ("known", "shared", "new")
MOST_GROWTH = 1.3
"""The goal: no fleet's script takes longer than this multiple of the smallest fleet's."""
_REQUESTS = 3
_OWNERS = 3


@dataclass(frozen=True)
class Times:
    """The times of a placement: script time of the mean call (the median over rounds), and round trips."""

    script_us: float
    round_trip_p50_us: float
    round_trip_p99_us: float


class Sample(NamedTuple):
    """The times of some placements: script time of the mean call, and every round trip."""

    script_us: float
    trips_us: list[float]


@dataclass(frozen=True)
class Row(Times):
    """One measurement."""

    replicas: int
    keys: int
    case: str


def random_keys(count: int) -> list[str]:
    return [os.urandom(16).hex() for _ in range(count)]


class Bench:
    """Places prompts on one pool and reads the cost."""

    def __init__(self, wire: Wire, pool: Pool) -> None:
        self._wire = wire
        self._pool = pool
        self._script = wire.script("place")
        self._settle = wire.script("settle")
        self._subset = Subset.of(pool.records)
        self._placed = 0
        self.why: Counter[str] = Counter()
        """Placements by reason."""

    async def place(self, keys: list[str]) -> tuple[float, int]:
        """Makes one placement and settles it. Returns its round trip and the script's time, in us."""
        self._placed += 1
        reservation = f"{GATEWAY}-{self._placed}"
        tokens = [TOKENS_PER_KEY * (i + 1) for i in range(len(keys))]
        request = PlaceRequest(
            *(reservation, keys, tokens, tokens[-1], PolicyKnobs(), self._placed), serving=self._subset, room_share=1.0
        )
        self._pool.subsets.use(self._subset)  # the first one makes the orders
        operands = request.operands(self._script, self._pool.keys, GATEWAY, 1, explain=False)
        await self._wire.send("CONFIG", "RESETSTAT")
        started = time.perf_counter()
        reply = await self._wire.run(self._script, operands)
        took_us = (time.perf_counter() - started) * 1e6
        assert reply[0] == b"ok", reply
        self.why[reply[4].decode()] += 1
        done = self._settle.operands(self._pool.keys, gateway=GATEWAY, sums="", settled=[("done", reservation, "")])
        script_us = await script_time_us(self._wire)
        await self._wire.run(self._settle, done)
        return took_us, script_us

    async def give_load(self, least_requests: int) -> None:
        """Gives each replica requests in flight, a backlog and a full cache, before the first placement."""
        dice, keys, names = random.Random(1), self._pool.keys, list(self._pool.records)
        active = {name: least_requests + int(dice.expovariate(1 / _REQUESTS)) for name in names}
        backlog = {name: sum(dice.choice((0, 0, 0, 200, 1000)) for _ in range(active[name])) for name in names}
        owned = {name: int(CAPACITY_TOKENS * dice.uniform(0.97, 1.0)) for name in names}
        for key, sums in ((keys.active, active), (keys.backlog_tokens, backlog), (keys.owned_tokens, owned)):
            await self._wire.send("HSET", key, *(each for pair in sums.items() for each in pair))

    async def chains(self, case: str, length: int) -> Callable[[], list[str]]:
        """Makes the chains of a case, whose owners are in the map."""
        names = list(self._pool.records)
        owners = names if case == "shared" else names[:_OWNERS]
        known = random_keys({"known": length, "shared": length // 2, "new": 0}[case])
        used_ms = int((await self._wire.send("TIME"))[0]) * 1000
        record = f"{INCARNATION} claim gpu {TOKENS_PER_KEY} 0 {used_ms} other"
        for key in known:
            await self._wire.send(
                "HSET", self._pool.keys.own(key), *(each for name in owners for each in (name, record))
            )
        return lambda: known + random_keys(length - len(known))

    async def measure(self, chain: Callable[[], list[str]], calls: int) -> Times:
        """The times of placements of such chains, one at a time."""
        return _times([await self.sample(chain, calls)])

    async def sample(self, chain: Callable[[], list[str]], calls: int) -> Sample:
        """Makes this many placements, one after another. A few before them do not count."""
        for _ in range(10):
            await self.place(chain())
        times = [await self.place(chain()) for _ in range(calls)]
        return Sample(sum(script_us for _, script_us in times) / calls, [trip_us for trip_us, _ in times])


async def script_time_us(wire: Wire) -> int:
    """The time in Redis of the only script that has run since CONFIG RESETSTAT."""
    found = re.match(r"calls=(\d+),usec=(\d+)", (await info(wire, "commandstats"))["cmdstat_evalsha"])
    assert found is not None
    assert int(found[1]) == 1, "something else ran scripts on this Redis"
    return int(found[2])


def _times(samples: list[Sample]) -> Times:
    trips_us = sorted(trip_us for sample in samples for trip_us in sample.trips_us)
    script_us = median(sample.script_us for sample in samples)
    return Times(script_us, trips_us[len(trips_us) // 2], trips_us[len(trips_us) * 99 // 100])


@dataclass
class Case:
    """The times collected so far for one line of the table."""

    bench: Bench
    replicas: int
    keys: int
    name: str
    chain: Callable[[], list[str]]
    samples: list[Sample] = field(default_factory=list)

    def row(self) -> Row:
        return Row(**asdict(_times(self.samples)), replicas=self.replicas, keys=self.keys, case=self.name)


async def run(url: str, options: argparse.Namespace, console: Console) -> list[Row]:
    """Measures all cases, with one pool for each number of replicas. The cases take turns, so that changes of the
    machine's speed affect all of them alike."""
    async with AsyncExitStack() as stack:
        cases = []
        for replicas in options.replicas:
            wire, pool = await open_pool(url, f"bench-{replicas}-{os.getpid()}", GATEWAY, replicas)
            stack.push_async_callback(wire.close)
            bench = Bench(wire, pool)
            await bench.give_load(options.least_requests)
            for keys, name in product((10, 40, 100), CASES):
                cases.append(Case(bench, replicas, keys, name, await bench.chains(name, keys)))
        with Progress(console=console, transient=True) as progress:
            for case in progress.track(cases * options.rounds, description="placing"):
                case.samples.append(await case.bench.sample(case.chain, options.calls))
        return [case.row() for case in cases]


def growth(rows: Sequence[Row], row: Row) -> float:
    """The script's time, as a multiple of that in the smallest fleet."""
    smallest = min(each.replicas for each in rows)
    base = (each for each in rows if (each.replicas, each.keys, each.case) == (smallest, row.keys, row.case))
    return row.script_us / next(base).script_us


def table(rows: Sequence[Row]) -> Table:
    drawn = tables.table(
        "One placement: one call to Redis, and this much of its time",
        (),
        ("replicas", "keys", "case", "script", "of the smallest fleet's", "round-trip p50", "p99"),
        caption=f"goal: no fleet's script takes more than {MOST_GROWTH} times as long as the smallest fleet's",
    )
    for row in rows:
        times = growth(rows, row)
        drawn.add_row(
            str(row.replicas),
            str(row.keys),
            row.case,
            f"{row.script_us:.0f} us",
            f"{'met' if times <= MOST_GROWTH else 'missed'}: {times:.2f}",
            f"{row.round_trip_p50_us:.0f} us",
            f"{row.round_trip_p99_us:.0f} us",
        )
    return drawn


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.place", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=counts, default="8,64,240,1000", help="default: %(default)s")
    parser.add_argument("--calls", type=count, default=50, help="placements of each case in a round (default: 50)")
    parser.add_argument("--rounds", type=count, default=15, help="rounds in which the cases take turns (default: 15)")
    parser.add_argument(
        "--least-requests", type=int, default=0, metavar="N", help="in flight on each replica (default: %(default)s)"
    )
    parser.add_argument("--redis-url", help="measure on this Redis instead of an embedded one")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    console = Console()
    with nullcontext(options.redis_url) if options.redis_url else embedded_redis() as url:
        version = asyncio.run(redis_version(url))
        rows = asyncio.run(run(url, options, console))
    console.print(table(rows))
    record.write(options.out, [asdict(row) for row in rows], {"redis": version})


if __name__ == "__main__":
    main()
