"""Measures what a queue costs Redis, by the number of requests that wait.

First nobody waits, and requests end. Then all replicas have all the requests that they may have, and so many more wait.
Then, in turns: 20 requests end, and each one's room is granted to a waiting one in the same script; 20 others come and
get seats.

    python -m bench.waiting [--waiting 20,100,1000] [--replicas 8,240] [--keys 10,40] [--tenants 10] [--rounds 15]
        [--out FILE]

end      the script that ends a request while nobody waits: its time in Redis (commandstats)
grant    by how much longer that script takes if it grants the room; and how long the whole takes in the slowest of a
         hundred calls
wait     the script that finds no room and takes a seat; and the slowest of a hundred

Times are means of a turn's 20 calls, and of these the median over all turns: in some, other programs use the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count as numbers
from itertools import product
from pathlib import Path
from statistics import mean, median, quantiles

import orjson
from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.embedded import embedded_redis, open_pool, redis_version
from bench.options import count, counts
from bench.place import GATEWAY, TOKENS_PER_KEY, random_keys, script_time_us
from coordinator.pool.pool import Pool
from coordinator.redis.wire import Wire
from coordinator.scripts import PlaceRequest, PolicyKnobs, Standing, load
from coordinator.subset import Subset

_KNOBS = PolicyKnobs(max_active_requests=4, max_waiting=1_000_000, max_waiting_per_tenant=1_000_000)
_AT_ONCE = 20
GOAL_US, GOAL_P99_US = 300, 1000


@dataclass(frozen=True)
class Row:
    """One measurement. `grant_p99_us` is that of a whole script, which ends a request and grants its room."""

    replicas: int
    waiting: int
    keys: int
    tenants: int
    end_us: float
    grant_us: float
    grant_p99_us: float
    wait_us: float
    wait_p99_us: float


class Queue:
    """One pool whose replicas are full."""

    def __init__(self, wire: Wire, pool: Pool, allow_oom: bool, keys: int, tenants: int) -> None:
        """Each request has a chain of so many keys, which nobody holds."""
        self._wire, self._pool, self._keys, self._tenants = wire, pool, keys, tenants
        self._place = load("place", allow_oom, _KNOBS)
        self._settle = load("settle", allow_oom)
        self._subset = Subset.of(pool.records)
        self._ids = numbers(1)
        self.live: list[str] = []

    async def place(self) -> bytes:
        """Places a request. Returns "ok" or "wait"."""
        number = next(self._ids)
        keys = random_keys(self._keys)
        tokens = [TOKENS_PER_KEY * (i + 1) for i in range(self._keys)]
        request = PlaceRequest(
            *(f"{GATEWAY}-{number}", keys, tokens, tokens[-1], _KNOBS, number),
            serving=self._subset,
            room_share=1.0,
            standing=Standing(tenant=f"t{number % self._tenants}", starve_ms=60_000),
        )
        self._pool.subsets.use(self._subset, _KNOBS.probe_ms)
        operands = request.operands(self._place, self._pool.keys, GATEWAY, 1, explain=False)
        status: bytes = (await self._wire.run(self._place, operands))[0]
        if status == b"ok":
            self.live.append(request.reservation)
        return status

    async def measure_end(self, rounds: int) -> float:
        """The script time of an end while nobody waits."""
        turns_us = list[list[int]]()
        for _ in range(rounds):
            for _ in range(_AT_ONCE):
                assert await self.place() == b"ok"
            turns_us.append([await self._script_us(self._end) for _ in range(_AT_ONCE)])
        return _typical(turns_us)

    async def fill(self, waiting: int) -> None:
        while await self.place() == b"ok":
            pass
        for _ in range(waiting - 1):
            assert await self.place() == b"wait"

    async def _end(self) -> None:
        ended = ("done", self.live.pop(0), "500 500")
        operands = self._settle.operands(self._pool.keys, gateway=GATEWAY, settled=[ended])
        await self._wire.run(self._settle, operands)

    async def end_one(self) -> None:
        """Ends a request. Another one must be granted its room."""
        await self._end()
        granted = await self._wire.send("LPOP", self._pool.keys.grants(GATEWAY))
        name, _, reply = orjson.loads(granted)
        assert reply[0] == "ok"
        self.live.append(name)

    async def measure(self, rounds: int) -> tuple[float, float, float, float]:
        """The script times of an end with a grant and of a wait, each with its 99th percentile."""
        grants_us, waits_us = list[list[int]](), list[list[int]]()
        for _ in range(rounds):
            grants_us.append([await self._script_us(self.end_one) for _ in range(_AT_ONCE)])
            waits_us.append([await self._script_us(self.place) for _ in range(_AT_ONCE)])
        return _typical(grants_us), _p99(grants_us), _typical(waits_us), _p99(waits_us)

    async def _script_us(self, call: Callable[[], Awaitable[object]]) -> int:
        """The time of one call in Redis."""
        await self._wire.send("CONFIG", "RESETSTAT")
        await call()
        return await script_time_us(self._wire)


def _typical(turns_us: Sequence[Sequence[int]]) -> float:
    return median(map(mean, turns_us))


def _p99(turns_us: Sequence[Sequence[int]]) -> float:
    return quantiles([us for turn in turns_us for us in turn], n=100)[-1]


async def run(url: str, options: argparse.Namespace) -> list[Row]:
    rows = []
    for replicas, keys, waiting in product(options.replicas, options.keys, options.waiting):
        name = f"bench-{replicas}-{keys}-{waiting}-{os.getpid()}"
        wire, pool, allow_oom = await open_pool(url, name, GATEWAY, replicas)
        try:
            queue = Queue(wire, pool, allow_oom, keys, options.tenants)
            end_us = await queue.measure_end(options.rounds)
            await queue.fill(waiting)
            both_us, *others_us = await queue.measure(options.rounds)
            rows.append(Row(replicas, waiting, keys, options.tenants, end_us, both_us - end_us, *others_us))
        finally:
            await wire.close()
    return rows


def table(rows: Sequence[Row]) -> Table:
    drawn = tables.table(
        "What a queue costs Redis: script time of a call",
        (),
        ("replicas", "waiting", "keys", "tenants", "end", "grant", "p99", "wait", "p99"),
        caption=f"goals: a grant takes at most {GOAL_US} us, and the p99 of a placement that waits {GOAL_P99_US} us",
    )
    for row in rows:
        times = [f"{us:.0f} us" for us in (row.end_us, row.grant_us, row.grant_p99_us, row.wait_us, row.wait_p99_us)]
        drawn.add_row(str(row.replicas), str(row.waiting), str(row.keys), str(row.tenants), *times)
    return drawn


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.waiting", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiting", type=counts, default="20,100,1000", help="default: %(default)s")
    parser.add_argument("--replicas", type=counts, default="8,240", help="default: %(default)s")
    parser.add_argument("--keys", type=counts, default="10,40", help="of a prompt, all new (default: %(default)s)")
    parser.add_argument("--tenants", type=count, default=10, help="default: %(default)s")
    parser.add_argument("--rounds", type=count, default=15, help="of 20 calls of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    with embedded_redis() as url:
        version = asyncio.run(redis_version(url))
        rows = asyncio.run(run(url, options))
    Console().print(table(rows))
    record.write(options.out, [asdict(row) for row in rows], {"redis": version})


if __name__ == "__main__":
    main()
