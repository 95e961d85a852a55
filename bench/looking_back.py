"""What it costs to keep the decisions on requests: Redis' time, and the CPU time of a gateway.

    python -m bench.looking_back [--replicas 3,8,16,64] [--requests 200] [--rounds 40] [--out FILE]

Requests are placed and settled on one pool, with a prompt of 40 keys, most of them known. The settings take turns in
each round: none kept; kept without costs; with the costs of a tenth of requests, as by default; with those of all. A
turn is compared with the turn of the same round that keeps none. The median of the rounds is shown. Redis' time is its
CPU time for a request: the placement, its settlements, its record, and the sockets. The gateway's is the time to pack
and send a record, in this process; with costs, for 8 candidates. Records are sent 100 at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

from prometheus_client import CollectorRegistry
from rich.console import Console

from bench import record, tables
from bench.embedded import embedded_redis, open_pool, redis_version, usage
from bench.options import count, counts
from bench.place import random_keys
from bench.store.requests import CHAIN_KEYS, SHAPE, TOKENS, known_chains
from coordinator.placement import Placement, PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.redis.wire import Wire
from coordinator.store import Store, StoreOptions
from gateway.control.past_decisions import PastDecisions
from gateway.metrics.fast_counters import FastCounter
from gateway.request.keyring import Keyring
from gateway.settings.gateway_settings import DecisionSettings, SecuritySettings

SHARES = {"none kept": None, "kept, without costs": 0.0, "costs of a tenth": 0.1, "costs of all": 1.0}
"""Of requests whose costs are kept."""
GOAL = 1.03
"""Of Redis' time for a request."""
_BATCH = 100
_NAMES = ("replica", "active_requests", "backlog_tokens", "matched_tokens", "charged_tokens", "displaced_tokens")
_FIELDS = (*_NAMES, "load_tokens", "cost")
_RECORD: dict[str, Any] = {
    "time": "2026-11-28T12:34:56.789+00:00",
    "gateway": "gateway-7f9c-1",
    "method": "POST",
    "path": "/v1/chat/completions",
    "status": 200,
    "code": None,
    "tenant": "research",
    "key": "alice",
    "duration_ms": 1804.3,
    "first_byte_ms": 212.9,
    **dict.fromkeys(("model", "served_model", "placed_as"), "meta-llama/Llama-3.1-8B-Instruct"),
    "backend": None,
    "stream": True,
    "prompt_tokens": 4012,
    "cached_tokens": 3904,
    "output_tokens": 311,
    "attempts": 1,
    "failed": [],
    "policy": "prefix_kv_aware",
    "state": "exact",
    "passed_over_tokens": 0,
    "waited_ms": 0.0,
}


@dataclass(frozen=True)
class Row:
    """One setting, over all rounds."""

    replicas: int
    setting: str
    redis_us: float
    redis_ratio: float


class Bench:
    """A gateway's calls to the store for each of its requests."""

    def __init__(self, wire: Wire, pool: Pool, past: PastDecisions, unsent: PastDecisions) -> None:
        self._wire, self._pool, self._past, self._unsent = wire, pool, past, unsent
        self._known, self._ids, self._dice = known_chains(), itertools.count(), random.Random(1)

    async def turn(self, share: float | None, requests: int) -> float:
        """Redis' CPU time for each of these requests, in us."""
        before = await usage(self._wire)
        for number in range(requests):
            placement = await self._serve(tells=share is not None and self._dice.random() < share)
            # In each turn: while a client works, Redis sleeps, and waking up takes CPU time, too.
            past = self._past if share is not None else self._unsent
            past.note(_record(next(self._ids), placement))
            if share is not None and number % _BATCH == 0:
                await past.flush()
        await asyncio.sleep(0.01)  # the last settlements
        return ((await usage(self._wire)).cpu_s - before.cpu_s) / requests * 1e6

    async def _serve(self, *, tells: bool) -> Placement:
        chain = self._dice.choice(self._known)
        if self._dice.random() < 0.1:
            chain = chain[: CHAIN_KEYS // 2] + random_keys(CHAIN_KEYS - CHAIN_KEYS // 2)
        name, knobs = f"bench.0-{next(self._ids):x}", replace(PolicyKnobs(), tells_costs=int(tells))
        request = PlaceRequest(name, chain, TOKENS, TOKENS[-1], knobs, self._dice.getrandbits(31), shape=SHAPE)
        placement = await self._pool.place(request)
        self._pool.first_token(name)
        await asyncio.sleep(0)
        self._pool.done(name)
        return cast("Placement", placement)


def _record(number: int, placement: Placement) -> dict[str, Any]:
    rows = zip(*placement.costs, strict=False)
    costs = [dict(zip(_FIELDS, (row[0].decode(), *row[1:]), strict=False)) for row in rows] or None
    placed = {"replica": placement.replica, "why": placement.why, "matched_tokens": placement.matched_tokens}
    return {**_RECORD, **placed, "request_id": f"{number * 0x9E3779B97F4A7C15 % 2**128:032x}", "costs": costs}


async def measure(url: str, replicas: int, requests: int, rounds: int) -> list[Row]:
    """All settings take turns, each round in another order."""
    wire, pool, _ = await open_pool(url, f"bench-{replicas}", "bench.0", replicas)
    found: dict[str, list[float]] = {name: [] for name in SHARES}
    store = Store(StoreOptions(url, budget_s=10.0), "bench.1", does_maintenance=False)
    async with asyncio.TaskGroup() as tasks:
        connected = tasks.create_task(store.run())
        await store.first_attempt()
        bench = Bench(wire, pool, _past(store), _past(store))
        for share in (0.0, 1.0):
            await bench.turn(share, 400)
        for _ in range(rounds):
            for name in random.sample(list(SHARES), len(SHARES)):
                found[name].append(await bench.turn(SHARES[name], requests))
        connected.cancel()
    await wire.close()
    return [_row(replicas, name, turns, found["none kept"]) for name, turns in found.items()]


def _past(store: Store) -> PastDecisions:
    counter = FastCounter("kvgate_decisions_not_kept", "", ["why"], CollectorRegistry())
    return PastDecisions(store, "", Keyring(SecuritySettings()), DecisionSettings(), counter)


def _row(replicas: int, name: str, turns: Sequence[float], without: Sequence[float]) -> Row:
    return Row(replicas, name, median(turns), median(one / none for one, none in zip(turns, without, strict=True)))


async def gateway_us(url: str, candidates: int, records: int = 4000) -> float:
    """The CPU time of a gateway to pack and send a record with so many candidates."""
    store = Store(StoreOptions(url, budget_s=10.0), "bench.2", does_maintenance=False)
    async with asyncio.TaskGroup() as tasks:
        connected = tasks.create_task(store.run())
        await store.first_attempt()
        past = _past(store)
        costs = [dict(zip(_FIELDS, (f"vllm-{at}", at, 977 * at, 0, 4012, 0, 530 * at, 9001 + at), strict=True))
                 for at in range(candidates)]  # fmt: skip
        told = {**_RECORD, "replica": "vllm-0", "why": "hit", "matched_tokens": 3904, "costs": costs or None}
        began_s = time.process_time()
        for number in range(records):
            past.note({**told, "request_id": f"{number * 0x9E3779B97F4A7C15 % 2**128:032x}"})
            if number % _BATCH == 0:
                await past.flush()
        took_s = time.process_time() - began_s
        connected.cancel()
    return took_s / records * 1e6


def main() -> None:
    record.begin()
    parser = argparse.ArgumentParser(
        prog="python -m bench.looking_back", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=counts, default="3,8,16,64", help="default: %(default)s")
    parser.add_argument("--requests", type=count, default=200, help="of a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=40, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options, rows = parser.parse_args(), list[Row]()
    for replicas in options.replicas:
        with embedded_redis() as url:
            rows += asyncio.run(measure(url, replicas, options.requests, options.rounds))
    with embedded_redis() as url:
        gateway = {candidates: asyncio.run(gateway_us(url, candidates)) for candidates in (0, 8)}
        version = asyncio.run(redis_version(url))
    goal = f"goal: by default at most {GOAL:.2f} times Redis' time"
    packed = f"A gateway's CPU for a record: {gateway[0]:.0f} us without costs, {gateway[8]:.0f} us with those of 8"
    heads = ("replicas", "decisions", "Redis", "of none kept")
    drawn = tables.table("Decisions that are kept: Redis' CPU time of a request", (), heads, caption=goal)
    for row in rows:
        drawn.add_row(str(row.replicas), row.setting, f"{row.redis_us:.0f} us", f"{row.redis_ratio:.3f}")
    console = Console()
    console.print(drawn)
    console.print(packed)
    record.write(options.out, [asdict(row) for row in rows], {"redis": version}, gateway_us=list(gateway.values()))


if __name__ == "__main__":
    main()
