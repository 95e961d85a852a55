"""The store's records of load and health, read directly from Redis."""

from __future__ import annotations

from itertools import chain

import redis.asyncio as redis

from bench.ledger import Sums, ask_sums, sums
from coordinator.keys import PoolKeys
from coordinator.registry import ReplicaRecord

# One script reads all, so that no event is applied in between.
_OWNED = """
local look = { redis.call('HGETALL', ARGV[1]), redis.call('HGETALL', ARGV[2]) }
for _, key in ipairs(redis.call('KEYS', ARGV[3])) do
  look[#look + 1] = redis.call('HGETALL', key)
end
return look
"""
_FORGET = "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end"


class Ledger:
    """Reads one pool's keys."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        self._client = client
        self._keys = PoolKeys(pool)

    async def sums(self) -> Sums:
        return sums(await self._client.eval(*ask_sums(self._keys)))

    async def ownership_problems(self) -> list[str]:
        """Replicas whose count of owned tokens is not the sum of their keys' records."""
        look = await self._client.eval(_OWNED, 0, self._keys.replicas, self._keys.owned_tokens, self._keys.own("*"))
        replicas, owned, *owners = ([*zip(flat[::2], flat[1::2], strict=True)] for flat in look)
        lives, owned = {name: ReplicaRecord.parse(name, text) for name, text in replicas}, dict(owned)
        recorded = dict.fromkeys(lives, 0)
        for owner, record in chain.from_iterable(owners):
            incarnation, _, _, span_tokens, _, last_use_ms, *_ = record.split(" ")
            if incarnation == lives[owner].incarnation and int(last_use_ms) >= lives[owner].since_ms:
                recorded[owner] += int(span_tokens)
        return [f"{name}: {owned[name]} of {tokens}" for name, tokens in recorded.items() if int(owned[name]) != tokens]

    async def replicas(self) -> dict[str, ReplicaRecord]:
        found = await self._client.hgetall(self._keys.replicas)
        return {name: ReplicaRecord.parse(name, text) for name, text in found.items()}

    async def agents(self) -> set[str]:
        """The replicas that an agent holds or has let go."""
        return set(await self._client.hkeys(self._keys.agents))

    async def gateways(self) -> list[str]:
        """The ids of the gateways that hold a lease: each is the configured id with the suffix of a life."""
        return sorted(await self._client.hkeys(self._keys.gateways))

    async def worker(self) -> str:
        """The id of the gateway that does the pool's maintenance; empty if there is none."""
        record = await self._client.hget(self._keys.leases, "worker")
        return (record or "").split(" ")[0]

    async def breakers(self) -> dict[str, str]:
        found: dict[str, str] = await self._client.hgetall(self._keys.breakers)
        return found

    async def forget_breakers(self) -> None:
        await self._client.delete(self._keys.breakers)

    async def forget_everything(self) -> None:
        """Deletes all keys of the pool, as FLUSHALL would."""
        await self._client.eval(_FORGET, 0, self._keys.own("").removesuffix("own:") + "*")

    async def all_keys(self) -> set[str]:
        """The keys of every pool."""
        return {key async for key in self._client.scan_iter("*")}

    async def in_flight(self, gateway: str) -> int:
        """The number of reservations of all lives of the gateway with this configured id."""
        # SCAN may return a key twice.
        keys = {key async for key in self._client.scan_iter(self._keys.flight(f"{gateway}.*"))}
        return sum([await self._client.hlen(key) for key in keys])
