"""Measures a placement at a moderate rate, and the effect of other work on the same Redis.

The rate does not depend on the answers. So while Redis stalls, all requests that are due still arrive.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from bench.embedded import CAPACITY_TOKENS, INCARNATION, Load, connect, info, open_pool, usage
from bench.place import TOKENS_PER_KEY, random_keys
from bench.store.beside import Found, Start, Work, company
from bench.store.requests import Gateway
from coordinator.agent.agent_store import AgentStore, Vitals
from coordinator.agent.residency import Evicted, Resident, Transition

POOL = "bench-latency"
GATEWAY = "gateway-0.bench0"
REPLICAS = 8
AGENTS = 3
_BATCHES_PER_S = 20
_TRANSITIONS = 40
"""Transitions in a batch. As in a full cache, half are computed blocks, and half are blocks that were evicted for
them."""
_BEAT_S = 0.5
_START_S = 30.0
_VALUES = 8
_VALUE_TTL_S = 60
_ROOM_FOR_VALUES = 64


@dataclass(frozen=True)
class Latency:
    """One run. `beside` names the other work of Redis, and `did` says how much of it was done per second."""

    beside: str
    rate_per_s: float
    placements: int
    p50_us: float
    p99_us: float
    max_us: float
    redis: Load
    did: Found = field(default_factory=dict)


def _new_prompt(replica: int) -> list[Resident]:
    """The new keys of a prompt: half a batch."""
    count, first = _TRANSITIONS // 2, replica << 60
    keys = random_keys(count)
    return [
        Resident(key, TOKENS_PER_KEY * (i + 1), TOKENS_PER_KEY, "gpu", first + int(key[:14], 16))
        for i, key in enumerate(keys)
    ]


@dataclass
class _Published:
    """What the agents published. `everyone` is set once each agent has published."""

    agents: int
    transitions: int = 0
    delays_ms: list[float] = field(default_factory=list)
    everyone: asyncio.Event = field(default_factory=asyncio.Event)
    _heard: set[str] = field(default_factory=set)

    def note(self, replica: str, transitions: int, delay_ms: float) -> None:
        self.transitions += transitions
        self.delays_ms.append(delay_ms)
        self._heard.add(replica)
        if len(self._heard) == self.agents:
            self.everyone.set()

    def delay_p99_ms(self) -> float:
        delays_ms = sorted(self.delays_ms)
        return delays_ms[len(delays_ms) * 99 // 100] if delays_ms else 0.0


async def _publish(url: str, number: int, published: _Published, end_s: Callable[[], float]) -> None:
    """One replica's agent: sends beats, and publishes the blocks that its engine stores and evicts."""
    loop, replica = asyncio.get_running_loop(), f"r{number}"
    link = await AgentStore.open(url, POOL, replica, f"{replica}.bench0")
    await link.register(INCARNATION, CAPACITY_TOKENS, f"http://127.0.0.1:{number}")
    seq, before, beat_s, due_s = 0, _new_prompt(number), 0.0, loop.time()
    while (now_s := loop.time()) < end_s():
        if now_s >= beat_s:
            await link.attend(Vitals("session", False, 0, seq, {"vllm:num_requests_running": 4.0}))
            beat_s = now_s + _BEAT_S
        after = _new_prompt(number)
        batch: list[Transition] = [*(Evicted(each.key) for each in before), *after]
        seq += 1
        began_s = loop.time()
        await link.publish(batch, 0.0, seq)
        published.note(replica, len(batch), (loop.time() - began_s) * 1000)
        before, due_s = after, due_s + 1 / _BATCHES_PER_S
        await asyncio.sleep(max(0.0, due_s - loop.time()))
    await link.attend(Vitals("session", False, 0, seq, {}), leaving=True)
    await link.close()


async def publish_events(start: Start, url: str, seconds: float, agents: int) -> Found:
    """Runs this many agents."""
    loop, published, end_s = asyncio.get_running_loop(), _Published(agents), math.inf
    async with asyncio.TaskGroup() as group:
        for number in range(agents):
            group.create_task(_publish(url, number, published, lambda: end_s))
        async with asyncio.timeout(_START_S):
            await published.everyone.wait()
        await start()
        published.transitions, published.delays_ms = 0, []
        end_s = loop.time() + seconds
    return {"transitions_per_s": published.transitions / seconds, "delay_p99_ms": published.delay_p99_ms()}


async def move_values(start: Start, url: str, seconds: float, value_bytes: int) -> Found:
    """A client that keeps chunks of the KV cache in this Redis: one connection, never idle."""
    wire, value = await connect(url), bytes(value_bytes)
    loop = asyncio.get_running_loop()
    await start()
    moved, end_s = 0, loop.time() + seconds
    while loop.time() < end_s:
        key = f"chunk:{moved % _VALUES}"
        await wire.send("SET", key, value, "EX", _VALUE_TTL_S)
        assert len(await wire.send("GET", key)) == value_bytes
        moved += 1
    await wire.close()
    return {"mb_per_s": 2 * moved * value_bytes / seconds / 1e6}


async def evict_values(start: Start, url: str, seconds: float, value_bytes: int) -> Found:
    """The same on a Redis at its memory limit: each chunk is new and evicts another."""
    wire, value, numbers = await connect(url), bytes(value_bytes), count()
    used_bytes = int((await info(wire, "memory"))["used_memory"])
    await wire.send("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    await wire.send("CONFIG", "SET", "maxmemory", used_bytes + _ROOM_FOR_VALUES * value_bytes)

    async def store() -> None:
        key = f"chunk:{next(numbers)}"
        await wire.send("SET", key, value, "EX", _VALUE_TTL_S)
        await wire.send("GET", key)

    for _ in range(2 * _ROOM_FOR_VALUES):
        await store()
    before = int((await info(wire, "stats"))["evicted_keys"])
    loop = asyncio.get_running_loop()
    await start()
    moved, end_s = 0, loop.time() + seconds
    while loop.time() < end_s:
        await store()
        moved += 1
    evicted = int((await info(wire, "stats"))["evicted_keys"]) - before
    await wire.close()
    return {"mb_per_s": 2 * moved * value_bytes / seconds / 1e6, "evictions_per_s": evicted / seconds}


@dataclass(frozen=True)
class Case:
    """Other work for Redis: its function and the function's argument."""

    beside: str
    work: Work | None = None
    argument: int = 0


CASES = (
    Case("nothing else"),
    Case(f"{AGENTS} agents", publish_events, AGENTS),
    Case("1 MB values", move_values, 1_000_000),
    Case("4 MB values", move_values, 4_000_000),
    Case("1 MB values, at the limit", evict_values, 1_000_000),
    Case("4 MB values, at the limit", evict_values, 4_000_000),
)


async def measure(url: str, case: Case, rate_per_s: float, seconds: float) -> Latency:
    """Measures placements beside one of the cases."""
    wire, pool = await open_pool(url, POOL, GATEWAY, REPLICAS)
    gateway, loop = Gateway(pool), asyncio.get_running_loop()
    await gateway.learn()
    with company(case.work, url, seconds, [case.argument]) as others:
        await others.start()
        before = await usage(wire)
        async with asyncio.TaskGroup() as requests:
            begin_s = loop.time()
            tasks = []
            for i in range(round(rate_per_s * seconds)):
                await asyncio.sleep(max(0.0, begin_s + i / rate_per_s - loop.time()))
                tasks.append(requests.create_task(gateway.serve()))
        load = (await usage(wire)).since(before)
        did = (await others.found())[0] if case.work is not None else {}
    await wire.close()
    trips_us = sorted(task.result() for task in tasks)
    p50_us, p99_us = trips_us[len(trips_us) // 2], trips_us[len(trips_us) * 99 // 100]
    return Latency(case.beside, rate_per_s, len(trips_us), p50_us, p99_us, trips_us[-1], load, did)
