"""Measures the chores of one gateway: how fast they remove keys, and what they cost Redis and placements.

    python -m bench.chores [--replicas 200] [--keys 5000] [--seconds 10] [--out FILE]

Cases: `quiet` (nothing is due), `trim` (no agents; every cache has room for half of its keys), `sweep` (agents; every
replica's floor has just moved above all its entries), `restart` (agents; every replica has just begun another
incarnation), `repair` (one heartbeat's search for unreadable records, alone). A probe on another connection asks Redis
every 2 ms: what it waits, a placement waits.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
from rich.console import Console

from bench import record, tables
from bench.embedded import CAPACITY_TOKENS, INCARNATION, connect, embedded_redis, info, open_pool, redis_version, usage
from bench.options import count, names, positive
from coordinator.chores.repair import Repair
from coordinator.chores.worker import Worker
from coordinator.pool.pool import Pool
from coordinator.redis.wire import Wire

CASES = ("quiet", "trim", "sweep", "restart", "repair")
POOL = "bench-chores"
GATEWAY = "bench.0"
TOKENS_PER_KEY = 65
_TICK_S = 0.5
_PROBE_S = 0.002
_FILL = """
local now = redis.call('TIME')[1] * 1000
local base, replica, number, first, keys = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local members = {}
for i = 1, keys do
  local key = string.format('%016x%016x', number, first + i)
  redis.call('HSET', base .. 'own:' .. key, replica, string.format(ARGV[6], string.format('%d', now)))
  members[2 * i - 1], members[2 * i] = string.format('%.3f', now + i / 1000), key
end
redis.call('ZADD', base .. 'held:' .. replica, unpack(members))
"""
_AT_ONCE = 1000


@dataclass(frozen=True)
class Row:
    """One case."""

    case: str
    replicas: int
    keys: int
    """Of all replicas."""
    seconds: float
    """Until all was done, or the limit."""
    removed: int
    removed_per_s: float
    redis_share: float
    """Of a core, without the heartbeats."""
    script_us: float
    """The chores' time in Redis' commands for a heartbeat."""
    untouched: int
    """Replicas of which no key was removed."""
    gateway_share: float
    """Of a core, of the gateway that does the chores."""
    probe_p99_ms: float
    probe_max_ms: float


class Stage:
    """A pool whose replicas own keys, and the gateway that does its chores."""

    def __init__(self, wire: Wire, pool: Pool, case: str, replicas: int, keys: int) -> None:
        self._wire, self._pool, self._case = wire, pool, case
        self._names = [f"r{i}" for i in range(replicas)]
        self._keys_each = keys
        self.worker = Worker(pool)
        self._repair = Repair(pool)

    async def fill(self) -> None:
        """Writes the keys, and what makes their removal due."""
        k, wire = self._pool.keys, self._wire
        is_exact = self._case != "trim"
        kind, rest = ("resident", "1 65 00000000000000aa") if is_exact else ("claim", "bench.0-1")
        base, template = k.anchor.removesuffix("-"), f"{INCARNATION} {kind} gpu {TOKENS_PER_KEY} 0 %s {rest}"
        for number, name in enumerate(self._names):
            for first in range(0, self._keys_each, _AT_ONCE):
                at_once = min(_AT_ONCE, self._keys_each - first)
                await wire.send("EVAL", _FILL, 0, base, name, number, first, at_once, template)
            await wire.send("HSET", k.owned_tokens, name, TOKENS_PER_KEY * self._keys_each)
        await self.describe("0")

    async def describe(self, floor: str, incarnation: str = INCARNATION) -> None:
        """Writes the replicas' records."""
        k, owned = self._pool.keys, TOKENS_PER_KEY * self._keys_each
        capacity = owned // 2 if self._case == "trim" else CAPACITY_TOKENS
        since_ms = 1 if incarnation == INCARNATION else await self._now_ms()
        text = f"{incarnation} ready {capacity} {since_ms} {floor} http://127.0.0.1:1"
        await self._wire.send("HSET", k.replicas, *(field for name in self._names for field in (name, text)))
        self._incarnation = incarnation

    async def make_due(self) -> None:
        if self._case == "sweep":
            await self.describe("2")
        elif self._case == "restart":
            await self.describe("0", INCARNATION[::-1])
            zeros = (field for name in self._names for field in (name, 0))
            await self._wire.send("HSET", self._pool.keys.owned_tokens, *zeros)

    async def attend(self) -> None:
        """Agents and appliers renew their leases."""
        if self._case == "trim":
            return
        k, until_ms = self._pool.keys, await self._now_ms() + 3000
        agents = (f for name in self._names for f in (name, f"a {self._incarnation} {until_ms} session 0 0 1"))
        leases = (field for name in self._names for field in (f"events:{name}", f"bench {until_ms}"))
        await asyncio.gather(self._wire.send("HSET", k.agents, *agents), self._wire.send("HSET", k.leases, *leases))

    async def held(self) -> list[int]:
        k = self._pool.keys
        return list(await asyncio.gather(*(self._wire.send("ZCARD", k.held(name)) for name in self._names)))

    async def tick(self) -> None:
        if self._case == "repair":
            await self._pool.beat()
            await self._repair.repair()
        else:
            await self.worker.tick()

    async def _now_ms(self) -> int:
        seconds, _ = await self._wire.send("TIME")
        return int(seconds) * 1000


async def _probe(wire: Wire, waits_ms: list[float]) -> None:
    while True:
        started = time.perf_counter()
        await wire.send("PING")
        waits_ms.append((time.perf_counter() - started) * 1000)
        await asyncio.sleep(_PROBE_S)


async def _command_us(wire: Wire) -> float:
    stats = await info(wire, "commandstats")
    ours = [text for name, text in stats.items() if name.removeprefix("cmdstat_") in _OURS]
    return sum(int(match[1]) for text in ours if (match := re.search(r"usec=(\d+)", text)))


_OURS = ("evalsha", "eval", "zrangebyscore", "zrange", "zcard", "hkeys", "hget")
"""The commands that chores send. Those inside scripts count twice; the share says the truth."""


async def measure(url: str, case: str, replicas: int, keys: int, seconds: float) -> Row:
    wire, pool, _ = await open_pool(url, POOL, GATEWAY, 0)
    stage = Stage(wire, pool, case, replicas, keys)
    await stage.fill()
    await stage.attend()
    if case != "trim":  # the first passes over all keys are another matter
        until_s = time.monotonic() + 4 * seconds
        while time.monotonic() < until_s:
            await stage.attend()
            await stage.tick()
            if stage.worker.is_idle:
                break
    wanted = {"trim": replicas * keys // 2, "sweep": 0, "restart": 0}.get(case, -1)
    await stage.make_due()
    prober, waits_ms = await connect(url), list[float]()
    probing = asyncio.ensure_future(_probe(prober, waits_ms))
    before, cpu_s, script_us, ticks = await usage(wire), time.process_time(), await _command_us(wire), 0
    started_s = time.monotonic()
    while (took_s := time.monotonic() - started_s) < seconds and sum(await stage.held()) > wanted:
        await stage.attend()
        begun_s, ticks = time.monotonic(), ticks + 1
        await stage.tick()
        await asyncio.sleep(max(0.0, begun_s + _TICK_S - time.monotonic()))
    load, cpu_s = (await usage(wire)).since(before), time.process_time() - cpu_s
    script_us = (await _command_us(wire) - script_us) / max(1, ticks)
    probing.cancel()
    with suppress(asyncio.CancelledError):
        await probing
    held = await stage.held()
    removed = replicas * keys - sum(held)
    waits_ms.sort()
    await wire.close()
    await prober.close()
    return Row(
        case=case,
        replicas=replicas,
        keys=replicas * keys,
        seconds=took_s,
        removed=removed,
        removed_per_s=removed / max(took_s, 1e-9),
        redis_share=load.cpu_share,
        script_us=script_us,
        untouched=sum(each == keys for each in held),
        gateway_share=cpu_s / max(took_s, 1e-9),
        probe_p99_ms=waits_ms[len(waits_ms) * 99 // 100],
        probe_max_ms=waits_ms[-1],
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.chores", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=count, default=200, help="(default: %(default)s)")
    parser.add_argument("--keys", type=count, default=5000, help="of each replica (default: %(default)s)")
    parser.add_argument("--seconds", type=positive, default=10.0, help="limit of a case (default: %(default)s)")
    parser.add_argument("--cases", type=names(CASES), default=list(CASES), help="(default: all)")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    return parser.parse_args()


def main() -> None:
    record.begin()
    options, rows = _options(), list[Row]()
    for case in options.cases:
        with embedded_redis() as url:
            rows.append(uvloop.run(measure(url, case, options.replicas, options.keys, options.seconds)))
    title = f"Chores over {options.replicas} replicas with {options.keys} keys each"
    figures = ("s", "removed", "a s", "untouched", "Redis", "gateway", "us a beat", "probe p99 ms", "max ms")
    table = tables.table(title, ("case",), figures)
    for row in rows:
        table.add_row(
            row.case,
            f"{row.seconds:.1f}",
            f"{row.removed:,}",
            f"{row.removed_per_s:,.0f}",
            f"{row.untouched}",
            f"{row.redis_share:.1%}",
            f"{row.gateway_share:.1%}",
            f"{row.script_us:,.0f}",
            f"{row.probe_p99_ms:.2f}",
            f"{row.probe_max_ms:.2f}",
        )
    Console().print(table)
    with embedded_redis() as url:
        versions = {"redis": uvloop.run(redis_version(url))}
    record.write(options.out, [asdict(row) for row in rows], versions)


if __name__ == "__main__":
    main()
