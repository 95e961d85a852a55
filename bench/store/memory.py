"""Measures the map's memory in Redis, and a placement's time when the map is large.

The records are written directly in the form of the data model (coordinator/README.md). A million placements would take
minutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from bench.embedded import INCARNATION, info, open_pool
from bench.place import GATEWAY, TOKENS_PER_KEY, Bench, Times, random_keys
from bench.store.requests import CHAIN_KEYS
from coordinator.keys import PoolKeys
from coordinator.redis.wire import Wire

POOL = "bench-memory"
REPLICAS = 64
_CHAINS_AT_ONCE = 100
_IN_USE_MS = 600_000
"""`used_ms` is this far ahead. Otherwise the first placement of each prompt would update it, more often in a large
map."""


@dataclass(frozen=True)
class Memory:
    """A map of one size with one kind of record, and placements of prompts that it knows."""

    kind: str
    keys: int
    replicas: int
    used_bytes: int
    """Redis' memory with the map."""
    bytes_per_key: float
    """The map's bytes per key: the key's own record, and its place in `held`."""
    encoding: str
    """Redis' encoding of a key's owners: `listpack` is compact, long records make it a `hashtable`."""
    hit_share: float
    """The share of placements on the replica that owns the prompt in the map."""
    times: Times


def _records(kind: str, chain: int, used_ms: int) -> Callable[[int], str]:
    """The record of the key at each depth of a chain."""
    if kind == "claim":
        reservation = f"gateway-0.bench0-{chain:x}"
        return lambda _depth: f"{INCARNATION} claim gpu {TOKENS_PER_KEY} 0 {used_ms} {reservation}"
    block = f"{random.getrandbits(64):016x}"
    head = f"{INCARNATION} resident gpu {TOKENS_PER_KEY} 0 {used_ms} {chain // REPLICAS + 1}"
    return lambda depth: f"{head} {TOKENS_PER_KEY * depth} {block}"


async def fill(wire: Wire, names: PoolKeys, kind: str, keys: int, advance: Callable[[int], None]) -> list[list[str]]:
    """Writes chains of keys, spread over the replicas. Reports to `advance` how many keys it wrote."""
    seconds, _ = await wire.send("TIME")
    used_ms = int(seconds) * 1000 + _IN_USE_MS
    chains: list[list[str]] = []
    for first in range(0, keys, CHAIN_KEYS):
        chain, number = random_keys(min(CHAIN_KEYS, keys - first)), len(chains)
        replica = f"r{number % REPLICAS}"
        record, members = _records(kind, number, used_ms), list[str]()
        for depth, key in enumerate(chain, 1):
            wire.send("HSET", names.own(key), replica, record(depth))
            members += (f"{used_ms + (len(chain) - depth) / 1000:.3f}", key)
        wire.send("ZADD", names.held(replica), *members)
        last = wire.send("HINCRBY", names.owned_tokens, replica, TOKENS_PER_KEY * len(chain))
        chains.append(chain)
        if len(chains) % _CHAINS_AT_ONCE == 0:
            await last
            advance(_CHAINS_AT_ONCE * CHAIN_KEYS)
    await last
    return chains


async def measure(url: str, kind: str, keys: int, calls: int, advance: Callable[[int], None]) -> Memory:
    """Fills an empty Redis, and places prompts that the map then knows."""
    wire, pool = await open_pool(url, POOL, GATEWAY, REPLICAS)
    names = pool.keys
    before_bytes = int((await info(wire, "memory"))["used_memory"])
    chains = await fill(wire, names, kind, keys, advance)
    used_bytes = int((await info(wire, "memory"))["used_memory"])
    encoding = (await wire.send("OBJECT", "ENCODING", names.own(chains[0][0]))).decode()
    bench = Bench(wire, pool)
    times = await bench.measure(lambda: random.choice(chains), calls)
    await wire.close()
    bytes_per_key = (used_bytes - before_bytes) / keys
    hit_share = bench.why["hit"] / bench.why.total()
    return Memory(kind, keys, REPLICAS, used_bytes, bytes_per_key, encoding, hit_share, times)
