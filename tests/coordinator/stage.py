"""Fixtures of coordinator tests: each pool has its own connection, and only the test sends heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import redis.asyncio as redis

from coordinator.errors import StoreError
from coordinator.keys import PoolKeys
from coordinator.maintenance.held_keys import (
    forget_older,
    look_at,
    stale_before_ms,
    sweep_piece,
    trim_piece,
)
from coordinator.maintenance.reaper import Reaper
from coordinator.placement import Placement, PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from coordinator.redis.wire import Wire, load_scripts
from coordinator.registry import PoolState, ReplicaRecord, each
from coordinator.store import Store
from tests.redis_server import RedisServer

SPAN_TOKENS = 100
KEYS = PoolKeys("m")


@asynccontextmanager
async def joined(url: str, gateway: str = "gw0", budget_s: float = 5.0) -> AsyncIterator[Pool]:
    """A pool on its own connection."""
    wire = await Wire.open(url, 5.0, lambda _error: None)

    async def connect(on_broken: Callable[[StoreError], None]) -> Wire:
        return await Wire.open(url, 5.0, on_broken)

    pool = Pool("m", gateway, budget_s, connect=connect)
    await load_scripts(wire)
    pool.attach(wire)
    try:
        yield pool
    finally:
        await pool.seats.close()
        pool.detach()
        await wire.close()


@asynccontextmanager
async def running(store: Store) -> AsyncIterator[Store]:
    """A store with its connection and heartbeat."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(store.run())
        await store.first_attempt()
        try:
            yield store
        finally:
            task.cancel()


@contextmanager
def standing_still(server: RedisServer) -> Iterator[None]:
    """A server that runs nothing meanwhile, and then all that it was sent."""
    server.pause()
    try:
        yield
    finally:
        server.resume()


async def beaten(pool: Pool) -> PoolState:
    """Sends a heartbeat and reaps the gateways that it names."""
    fleet = await pool.beat()
    reaper = Reaper(pool)
    await reaper.give_back(fleet.expired_gateways)
    if fleet.worker == pool.gateway:
        await reaper.handle_claims()
    return fleet


async def chain_of(client: redis.Redis, tip: str) -> str | None:
    """The chain that a placement stored for its tip."""
    found = [await client.hget(KEYS.bound_slot(slot), tip) for slot in (0, 1)]
    return next((text for text in found if text is not None), None)


async def drained(*pools: Pool) -> None:
    """Waits until the server has run every command that these pools send without waiting."""
    for pool in pools:
        for _ in range(3):  # a batch sent in the next turn, and the calls that its replies cause
            pool.settlements.send()
            await pool.read("PING")


async def drop(pool: Pool, client: redis.Redis, name: str, keys: list[str]) -> int:
    """Makes these keys of a replica the least recently used ones and drops them, as maintenance does."""
    await drained(pool)
    if keys:
        await client.zadd(KEYS.held(name), dict.fromkeys(keys, 1), xx=True)
    return await forget_older(pool, name, 2)


async def sweep(pool: Pool, replica: str, claims_before_ms: int = 0) -> int:
    """Remove a replica's keys whose records are not valid any more; returns how many."""
    [look], total = await look_at(pool, [replica]), 0
    left = look.count
    while left:
        left, swept = await sweep_piece(pool, replica, left, claims_before_ms, 0)
        total += swept
    return total


async def trim(pool: Pool, record: ReplicaRecord, state: PoolState) -> int:
    """Drop what the replica no longer holds; returns the number of keys dropped."""
    total = 0
    while dropped := await trim_piece(pool, record.replica, stale_before_ms(record, state), True):
        total += dropped
    return total


def replica(name: str, incarnation: str = "life1", state: str = "ready", capacity_tokens: int = 0) -> ReplicaRecord:
    return ReplicaRecord(name, incarnation, state, capacity_tokens, 0, f"http://{name}.test:8000")


async def register(pool: Pool, count: int, **changes: Any) -> list[str]:
    """Registers replicas r0, r1, …"""
    names = [f"r{i}" for i in range(count)]
    await asyncio.gather(*(pool.register(replica(name, **changes)) for name in names))
    return names


def chain(*parts: Any) -> list[str]:
    """A key for each part. Each key is a digest of all parts up to it, so chains with equal beginnings share keys."""
    keys, digest = [], blake2b(digest_size=16)
    for part in parts:
        digest.update(f"{part}|".encode())
        keys.append(digest.hexdigest())
    return keys


def request(reservation: str, keys: list[str], **changes: Any) -> PlaceRequest:
    """A request whose prompt has 100 tokens per key."""
    tokens = [SPAN_TOKENS * (i + 1) for i in range(len(keys))]
    prompt_tokens = SPAN_TOKENS * len(keys) or 1
    plain = PlaceRequest(reservation, keys, tokens, prompt_tokens, PolicyKnobs(), seed=1, may_report=True)
    return replace(plain, **changes)


async def place(pool: Pool, reservation: str, keys: list[str], **changes: Any) -> Placement:
    if not pool.records:  # another gateway has registered the replicas
        pool.replicas.records = each(await pool.read("HGETALL", pool.keys.replicas), ReplicaRecord.parse)
    placement = await pool.place(request(reservation, keys, **changes))
    assert placement is not None
    return placement


async def now_ms(client: redis.Redis) -> int:
    seconds, microseconds = await client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


async def hash_of(client: redis.Redis, key: str) -> dict[str, str]:
    return dict(await client.hgetall(key))


async def numbers(client: redis.Redis, key: str) -> dict[str, int]:
    """A hash of integers, without the zeros."""
    return {name: int(value) for name, value in (await client.hgetall(key)).items() if value != "0"}


async def owners(client: redis.Redis, key: str) -> dict[str, list[str]]:
    """replica → the fields of its ownership record."""
    return {name: text.split(" ") for name, text in (await hash_of(client, KEYS.own(key))).items()}


async def own(
    client: redis.Redis, key: str, name: str, incarnation: str = "life1", hits: int = 0, last_use_ms: int | None = None
) -> None:
    """Writes an ownership record as `place` would."""
    used = await now_ms(client) if last_use_ms is None else last_use_ms
    await client.hset(KEYS.own(key), name, f"{incarnation} claim gpu {SPAN_TOKENS} {hits} {used} other")


async def keys_of(client: redis.Redis, pattern: str) -> set[str]:
    """The keys that match. SCAN may return a key twice while Redis shrinks its table: after many deletions, say."""
    return {key async for key in client.scan_iter(pattern)}


async def dump(client: redis.Redis, *patterns: str) -> dict[str, Any]:
    """The value of every key that matches a pattern, or of every key if there is no pattern."""
    readers: dict[str, Callable[[str], Any]] = {
        "string": client.get,
        "hash": client.hgetall,
        "zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        "stream": client.xrange,
        "list": lambda key: client.lrange(key, 0, -1),
        "set": client.smembers,
    }
    found: set[str] = set()
    for pattern in patterns or ("*",):
        found |= await keys_of(client, pattern)
    return {key: await readers[await client.type(key)](key) for key in sorted(found)}


async def calls_of(client: redis.Redis) -> dict[str, int]:
    """The commands executed since CONFIG RESETSTAT, including those inside scripts."""
    stats = await client.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(value["calls"]) for name, value in stats.items()}
