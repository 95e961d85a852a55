"""Measures what heartbeats and events cost in Redis, by the size of the fleet.

    python -m bench.beats costs [--replicas 8,64,500,1000] [--gateways 50]
    python -m bench.beats fleet [--replicas 1000] [--gateways 50] [--requests-per-s 800] [--seconds 20]

`costs` runs each script alone, at the rate that the fleet would, on a pool at rest: the script's own time (Redis'
slow log), the bytes of its answers, and for `beat` the gateway's CPU time. An entry has 10 transitions.

`fleet` runs all of them together: agents that publish what their engines store and evict for so many requests, and
gateways that beat and apply. A request stores 25 keys and evicts as many, in two batches 100 ms apart. It tells how
busy Redis is with each script, and the time from an engine's event to the map. Placements are not part of it
(bench.place).

Both start an embedded Redis. Agents have a process of their own; connections are shared among agents.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import multiprocessing
import os
import random
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from bench import record, tables
from bench.embedded import CAPACITY_TOKENS, INCARNATION, connect, embedded_redis, info, redis_version, usage
from bench.options import count, counts
from coordinator.agent.agent_store import AgentStore, Attended, Vitals
from coordinator.agent.engine_session import publish_at_s
from coordinator.agent.residency import Evicted, Resident, Transition
from coordinator.chores.applier import Applied, Applier
from coordinator.keys import PoolKeys
from coordinator.pool.pool import LEASE_MS, Pool
from coordinator.redis.wire import Wire, load_scripts
from coordinator.registry import pairs
from coordinator.scripts import NAMES, load
from gateway.tasks import Tasks

POOL = "bench"
BEAT_S = 0.5
AGENTS_A_WIRE = 64
TRANSITIONS = 10
KEYS_A_REQUEST = 25
KEYS_HELD = 200
BATCHES_A_REQUEST = 2
LOGGED_US = 8
"""Scripts take longer; commands in scripts seldom do."""
SHARING_ROUNDS = 40
"""Heartbeats of each applier until all have their shares."""
BATCH_APART_S = 0.1
COUNTERS = dict.fromkeys(
    (
        *("running", "waiting", "kv_usage", "prefix_queries_tokens", "prefix_hits_tokens", "generated_tokens"),
        *("prefill_s", "prefills", "prefill_computed_tokens", "cpu_load_s"),
    ),
    123456.5,
)


@dataclass(frozen=True)
class Cost:
    """One script, called at the rate of the fleet."""

    replicas: int
    script: str
    script_us: float
    answer_bytes: float
    client_us: float
    calls_per_s: float

    @property
    def core_share(self) -> float:
        return self.script_us * self.calls_per_s / 1e6


class SimulatedAgent:
    """An agent of a replica whose cache holds KEYS_HELD keys."""

    def __init__(self, wire: Wire, allow_oom: bool, replica: str) -> None:
        self.store = AgentStore(wire, allow_oom, PoolKeys(POOL), replica, f"{replica}.abcdef")
        self.store.incarnation = INCARNATION
        self.replica = replica
        self.held: deque[str] = deque()
        self.seq = 0
        self.agents = 1
        self._pending: list[Transition] = []
        self._oldest_s = 0.0
        self._published_at_s = 0.0
        self._is_publishing = False

    async def attend(self) -> None:
        self.seq += 1
        counters = COUNTERS | {"generated_tokens": float(self.seq)}
        answer = await self.store.attend(Vitals("session", False, 1, self.seq, counters))
        assert isinstance(answer, Attended)
        self.agents = answer.agents

    def changes(self, stored: int) -> list[Transition]:
        """Its engine stores so many keys, and evicts what its cache has no room for."""
        keys = [os.urandom(16).hex() for _ in range(stored)]
        self.held.extend(keys)
        found: list[Transition] = [Resident(key, 100 * (i + 1), 100, "gpu", 7) for i, key in enumerate(keys)]
        while len(self.held) > KEYS_HELD:
            found.append(Evicted(self.held.popleft()))
        return found

    def stores(self, keys: int, tasks: Tasks) -> None:
        """The engine stores so many keys now. They are published when the agent has gathered for long enough."""
        if not self._pending:
            self._oldest_s = time.monotonic()
        self._pending += self.changes(keys)
        if not self._is_publishing:
            self._is_publishing = True
            tasks.spawn(self._publish_all(), "publish")

    async def _publish_all(self) -> None:
        while self._pending:
            now_s = time.monotonic()
            await asyncio.sleep(publish_at_s(now_s, self._published_at_s, self.agents) - now_s)
            self._published_at_s = time.monotonic()
            batch, self._pending = self._pending, []
            self.seq += 1
            await self.store.publish(batch, time.monotonic() - self._oldest_s, self.seq)
        self._is_publishing = False


async def agents_on(url: str, replicas: int, stack: AsyncExitStack) -> list[SimulatedAgent]:
    """Registered replicas, each with an agent."""
    agents: list[SimulatedAgent] = []
    for first in range(0, replicas, AGENTS_A_WIRE):
        wire = await connect(url)
        stack.push_async_callback(wire.close)
        allow_oom = await load_scripts(wire)
        for i in range(first, min(replicas, first + AGENTS_A_WIRE)):
            agent = SimulatedAgent(wire, allow_oom, f"vllm-{i:04d}.vllm:8000")
            await agent.store.register(INCARNATION, CAPACITY_TOKENS, f"http://{agent.replica}")
            await agent.attend()
            agents.append(agent)
    return agents


async def gateways_on(url: str, gateways: int, stack: AsyncExitStack) -> list[Pool]:
    """Gateways' clients, each on a connection of its own."""
    pools = []
    for i in range(gateways):
        wire = await connect(url)
        stack.push_async_callback(wire.close)
        pool = Pool(POOL, f"gateway-{i}.abcdef", budget_s=10.0)
        pool.attach(wire, await load_scripts(wire))
        pools.append(pool)
    return pools


# -- costs -----------------------------------------------------------------------------------------------------------


class Costs:
    """Measures each script on one pool."""

    def __init__(self, url: str, control: Wire, replicas: int, gateways: int) -> None:
        self._url = url
        self._control = control
        self._replicas = replicas
        self._gateways = gateways
        self._pools: list[Pool] = []
        self._cursors: dict[str, dict[str, str]] = {}
        """By gateway: those of the streams that it holds."""

    async def rows(self) -> list[Cost]:
        async with AsyncExitStack() as stack:
            await self._control.send("FLUSHALL")
            agents = await agents_on(self._url, self._replicas, stack)
            self._pools = await gateways_on(self._url, self._gateways, stack)
            for _ in range(SHARING_ROUNDS):
                for pool in self._pools:
                    await pool.beat()
                    await self._lead(pool)
            await asyncio.gather(*(agent.attend() for agent in agents))
            beating, leading = itertools.cycle(self._pools), itertools.cycle(self._pools)
            attending, publishing = itertools.cycle(agents), itertools.cycle(agents)
            calls, calls_per_s = 2 * self._gateways, self._gateways / BEAT_S
            return [
                await self._cost("beat", lambda: next(beating).beat(), calls, calls_per_s),
                await self._cost("lead", lambda: self._lead(next(leading)), calls, calls_per_s),
                await self._cost("attend", lambda: next(attending).attend(), 500, self._replicas / BEAT_S),
                await self._cost("publish", lambda: _publish(next(publishing)), 500, 0),
                await self._apply(),
            ]

    async def _lead(self, pool: Pool) -> None:
        known = list(self._cursors.get(pool.gateway, ()))
        self._cursors[pool.gateway] = pairs(
            await pool.run("lead", applier=pool.gateway, lease_ms=LEASE_MS, leaving=False, known=known)
        )

    async def _apply(self) -> Cost:
        """Applies what was published, one entry a call."""
        unread = []
        for pool in self._pools:
            await self._lead(pool)
            for replica, cursor in self._cursors[pool.gateway].items():
                known = cursor
                for stream_id, fields in await pool.read("XRANGE", pool.keys.events(replica), "-", "+"):
                    entry = pairs(fields)
                    unread.append((pool, replica, known, stream_id, entry))
                    known = f"{stream_id.decode()} {entry['n']}"
        each = iter(unread)

        async def apply() -> None:
            pool, replica, known, stream_id, entry = next(each)
            lines = entry["transitions"].split("\n")
            status, *_ = await pool.run(
                "apply",
                applier=pool.gateway,
                replica=replica,
                known_cursor=known,
                stream_id=stream_id,
                number=entry["n"],
                incarnation=entry["inc"],
                happened_ms=entry["at_ms"],
                keys=[line.split(" ")[1] for line in lines],
                transitions=lines,
            )
            assert status == b"ok", status

        return await self._cost("apply", apply, len(unread), 0)

    async def _cost(self, script: str, call: Callable[[], Awaitable[Any]], calls: int, calls_per_s: float) -> Cost:
        """Calls it so often: evenly, if gateways do so themselves; else without a pause."""
        beating = Tasks()
        beating.spawn(_beat_forever(self._pools[0], 0.0), "beat")  # without beats, leads look at everything
        await asyncio.sleep(0)
        await self._control.send("CONFIG", "RESETSTAT")
        client_s = 0.0
        async with slow_log(self._control) as spent:
            for _ in range(calls):
                began_s = time.process_time()
                await call()
                client_s += time.process_time() - began_s
                if script in ("beat", "lead"):
                    await asyncio.sleep(1 / calls_per_s)
            sent = int((await info(self._control, "stats"))["total_net_output_bytes"])
        await beating.close()
        script_us = sum(spent[script]) / len(spent[script])
        return Cost(self._replicas, script, script_us, sent / calls, client_s / calls * 1e6, calls_per_s)


async def _publish(agent: SimulatedAgent) -> None:
    agent.seq += 1
    await agent.store.publish(agent.changes(TRANSITIONS), 0.0, agent.seq)


async def costs(url: str, sizes: list[int], gateways: int) -> list[Cost]:
    control = await connect(url)
    try:
        return [cost for size in sizes for cost in await Costs(url, control, size, gateways).rows()]
    finally:
        await control.close()


# -- fleet -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """What one script took of a core."""

    script: str
    calls_per_s: float
    mean_us: float
    core_share: float


@dataclass(frozen=True)
class Run:
    """All together for a while."""

    shares: list[Share]
    redis_core_share: float
    redis_waiting_share: float
    """The share of the time in which Redis waited for a core: if it is large, this machine was too busy."""
    sent_bytes_per_s: float
    received_bytes_per_s: float
    lag_p50_ms: int
    lag_p99_ms: int
    transitions_per_s: float
    entries_per_s: float


def run_agents(url: str, replicas: int, requests_per_s: float, ready: Any, seed: int) -> None:
    """The agents' process."""
    asyncio.run(_run_agents(url, replicas, requests_per_s, ready, random.Random(seed)))


async def _run_agents(url: str, replicas: int, requests_per_s: float, ready: Any, dice: random.Random) -> None:
    async with AsyncExitStack() as stack:
        agents = await agents_on(url, replicas, stack)
        for agent in agents:
            await agent.store.publish(agent.changes(KEYS_HELD), 0.0, 1)
        tasks = Tasks()
        for i, agent in enumerate(agents):
            tasks.spawn(_attend_forever(agent, i / replicas * BEAT_S), "attend")
        ready.set()
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        while True:
            at_s += dice.expovariate(requests_per_s)
            await asyncio.sleep(max(0.0, at_s - loop.time()))
            agent = dice.choice(agents)
            stored = KEYS_A_REQUEST // BATCHES_A_REQUEST
            for batch in range(BATCHES_A_REQUEST):
                many = KEYS_A_REQUEST - stored * (BATCHES_A_REQUEST - 1) if batch == 0 else stored
                loop.call_later(batch * BATCH_APART_S, agent.stores, many, tasks)


async def _attend_forever(agent: SimulatedAgent, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    while True:
        await agent.attend()
        await asyncio.sleep(BEAT_S)


async def _beat_forever(pool: Pool, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    while True:
        await pool.beat()
        await asyncio.sleep(BEAT_S)


async def fleet(url: str, replicas: int, gateways: int, requests_per_s: float, seconds: float) -> Run:
    """Runs agents, gateways and appliers, and measures for `seconds` once the appliers have caught up."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=run_agents, args=(url, replicas, requests_per_s, ready, 1), daemon=True)
    process.start()
    applied: list[Applied] = []
    async with AsyncExitStack() as stack:
        control = await connect(url)
        stack.push_async_callback(control.close)
        await asyncio.to_thread(ready.wait)
        tasks = Tasks()
        stack.push_async_callback(tasks.close)
        for i, pool in enumerate(await gateways_on(url, gateways, stack)):
            tasks.spawn(_beat_forever(pool, i / gateways * BEAT_S), "beat")
            tasks.spawn(Applier(url, pool.gateway, POOL, applied.append).run(), "apply")
        await asyncio.sleep(10)  # until leases are shared out and what was held at first is applied
        applied.clear()
        run = await _measure(control, applied, seconds)
        process.kill()
        return run


async def _measure(control: Wire, applied: list[Applied], seconds: float) -> Run:
    await control.send("CONFIG", "RESETSTAT")
    before, began_s = await usage(control), time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    load, stats = (await usage(control)).since(before), await info(control, "stats")
    lags = sorted(one.lag_ms for one in applied) or [0]
    transitions, entries = sum(one.transitions for one in applied), len(applied)
    return Run(
        await _shares(control),
        load.cpu_share,
        load.waiting_share,
        int(stats["total_net_output_bytes"]) / took_s,
        int(stats["total_net_input_bytes"]) / took_s,
        lags[len(lags) // 2],
        lags[len(lags) * 99 // 100],
        transitions / took_s,
        entries / took_s,
    )


async def _shares(control: Wire, seconds: float = 2.0) -> list[Share]:
    """How much of a core each script and command takes."""
    began_s = time.monotonic()
    async with slow_log(control) as spent:
        await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    shares = [Share(name, len(us) / took_s, sum(us) / len(us), sum(us) / took_s / 1e6) for name, us in spent.items()]
    return sorted(shares, key=lambda share: -share.core_share)


@asynccontextmanager
async def slow_log(control: Wire) -> AsyncIterator[dict[str, list[int]]]:
    """The time of each call meanwhile, in us, by script (and XREAD). Filled in at the end, from Redis' slow log, which
    also logs the commands in scripts: the threshold leaves nearly all of these out, as logging takes time as well."""
    names = {load(name, allow_oom).sha.encode(): name for name in NAMES for allow_oom in (True, False)}
    spent: dict[str, list[int]] = defaultdict(list)
    await control.send("CONFIG", "SET", "slowlog-max-len", 1_000_000)
    await control.send("SLOWLOG", "RESET")
    await control.send("CONFIG", "SET", "slowlog-log-slower-than", LOGGED_US)
    yield spent
    await control.send("CONFIG", "SET", "slowlog-log-slower-than", -1)
    for _, _, spent_us, arguments, *_ in await control.send("SLOWLOG", "GET", -1):
        command = arguments[0].upper()
        if command in (b"EVALSHA", b"EVAL", b"XREAD"):
            spent[names.get(arguments[1], "XREAD")].append(spent_us)


# -- tables ----------------------------------------------------------------------------------------------------------


def costs_table(rows: list[Cost]) -> Any:
    drawn = tables.table(
        "One call of each script, on a pool at rest",
        ("script",),
        ("replicas", "script us", "answer bytes", "client us", "calls per s", "of a core", "KB per s"),
        caption="client us: CPU time of the caller, for the call and its answer",
    )
    for row in rows:
        drawn.add_row(
            row.script,
            str(row.replicas),
            f"{row.script_us:.0f}",
            f"{row.answer_bytes:.0f}",
            f"{row.client_us:.0f}",
            f"{row.calls_per_s:.0f}",
            f"{row.core_share:.1%}",
            f"{row.answer_bytes * row.calls_per_s / 1000:.0f}",
        )
    return drawn


def fleet_table(run: Run) -> Any:
    caption = (
        f"Redis: {run.redis_core_share:.0%} of a core (it waited for one {run.redis_waiting_share:.0%} of the time), "
        f"{run.sent_bytes_per_s / 1000:.0f} KB/s out, "
        f"{run.received_bytes_per_s / 1000:.0f} KB/s in; event lag p50 {run.lag_p50_ms} ms, p99 {run.lag_p99_ms} ms; "
        f"{run.transitions_per_s:.0f} transitions/s in {run.entries_per_s:.0f} entries/s"
    )
    drawn = tables.table("All together", ("script",), ("calls per s", "mean us", "of a core"), caption=caption)
    for share in run.shares:
        drawn.add_row(share.script, f"{share.calls_per_s:.0f}", f"{share.mean_us:.0f}", f"{share.core_share:.1%}")
    return drawn


def main() -> None:
    record.begin()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = argparse.ArgumentParser(prog="python -m bench.beats", description=__doc__)
    parser.add_argument("what", choices=("costs", "fleet"))
    parser.add_argument("--replicas", type=counts, default=[8, 64, 500, 1000], help="sizes; fleet runs the last")
    parser.add_argument("--gateways", type=count, default=50)
    parser.add_argument("--requests-per-s", type=count, default=800, help="of the fleet (default: 800)")
    parser.add_argument("--seconds", type=count, default=20, help="how long the fleet is measured (default: 20)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    console = Console()
    with embedded_redis() as url:
        version = asyncio.run(redis_version(url))
        if options.what == "costs":
            rows = asyncio.run(costs(url, options.replicas, options.gateways))
            console.print(costs_table(rows))
            found = [asdict(row) for row in rows]
        else:
            size = options.replicas[-1]
            run = asyncio.run(fleet(url, size, options.gateways, options.requests_per_s, options.seconds))
            console.print(fleet_table(run))
            found = [asdict(run)]
    record.write(options.out, found, {"redis": version})


if __name__ == "__main__":
    main()
