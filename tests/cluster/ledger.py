"""What the store says of load and health, read past the gateways."""

from __future__ import annotations

from dataclasses import dataclass

import redis.asyncio as redis

from coordinator.keys import PoolKeys
from coordinator.registry import ReplicaRecord

# In one step, so that no reservation comes or goes in between.
_LOOK = """
local look = { redis.call('HGETALL', ARGV[1]), redis.call('HGETALL', ARGV[2]), redis.call('HGETALL', ARGV[3]) }
for _, flight in ipairs(redis.call('KEYS', ARGV[4])) do
  look[#look + 1] = redis.call('HVALS', flight)
end
return look
"""
_RECORDS = """
local records = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local owners = redis.call('HGETALL', key)
  for i = 1, #owners, 2 do
    records[#records + 1] = { owners[i], owners[i + 1] }
  end
end
return records
"""
_FORGET = "for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end"


@dataclass(frozen=True, slots=True)
class Sums:
    """One consistent look: the sums that are kept, and the same summed again from the reservations in flight."""

    active: dict[str, int]
    backlog_tokens: dict[str, int]
    counted: dict[str, int]
    counted_backlog_tokens: dict[str, int]
    in_flight: int
    """Entries in flight, those on a past incarnation included."""

    @property
    def total(self) -> int:
        return sum(self.active.values())

    @property
    def are_zero(self) -> bool:
        return not self.in_flight and not any(self.active.values()) and not any(self.backlog_tokens.values())

    def problems(self) -> list[str]:
        """What can never be, whatever happens: a negative sum, or one that is not the sum of its reservations."""
        found = []
        for name, kept, counted in (
            ("active", self.active, self.counted),
            ("backlog_tokens", self.backlog_tokens, self.counted_backlog_tokens),
        ):
            for replica in kept.keys() | counted.keys():
                value = kept.get(replica, 0)
                if value < 0 or value != counted.get(replica, 0):
                    found.append(f"{name} of {replica} is {value}, its reservations make {counted.get(replica, 0)}")
        return found


class Ledger:
    """Reads one pool's keys."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        self._client = client
        self._keys = PoolKeys(pool)

    async def sums(self) -> Sums:
        look = await self._client.eval(
            _LOOK, 0, self._keys.replicas, self._keys.active, self._keys.backlog_tokens, self._keys.flight("*")
        )
        replicas, active, backlog = (dict(zip(flat[::2], flat[1::2], strict=True)) for flat in look[:3])
        entries = look[3:]
        lives = {name: ReplicaRecord.parse(name, text) for name, text in replicas.items()}
        counted: dict[str, int] = {}
        counted_backlog: dict[str, int] = {}
        for entry in (entry for flight in entries for entry in flight):
            replica, incarnation, since_ms, backlog_tokens, _ = entry.split(" ")
            life = lives.get(replica)
            if life is not None and (life.incarnation, str(life.since_ms)) == (incarnation, since_ms):
                counted[replica] = counted.get(replica, 0) + 1
                counted_backlog[replica] = counted_backlog.get(replica, 0) + int(backlog_tokens)
        return Sums(
            {name: int(value) for name, value in active.items()},
            {name: int(value) for name, value in backlog.items()},
            counted,
            counted_backlog,
            sum(len(flight) for flight in entries),
        )

    async def ownership_problems(self) -> list[str]:
        """Where the tokens that a replica is believed to own are not the sum of its keys' records."""
        lives, owned = await self.replicas(), await self._client.hgetall(self._keys.owned_tokens)
        recorded = dict.fromkeys(lives, 0)
        for owner, record in await self._client.eval(_RECORDS, 0, self._keys.own_prefix + "*"):
            incarnation, _, _, span_tokens, _, last_use_ms, *_ = record.split(" ")
            if incarnation == lives[owner].incarnation and int(last_use_ms) >= lives[owner].since_ms:
                recorded[owner] += int(span_tokens)
        return [f"{name}: {owned[name]} of {tokens}" for name, tokens in recorded.items() if int(owned[name]) != tokens]

    async def replicas(self) -> dict[str, ReplicaRecord]:
        found = await self._client.hgetall(self._keys.replicas)
        return {name: ReplicaRecord.parse(name, text) for name, text in found.items()}

    async def agents(self) -> set[str]:
        """The replicas that an agent holds, or let go."""
        return set(await self._client.hkeys(self._keys.agents))

    async def gateways(self) -> list[str]:
        """The ids of the gateways that hold a lease: each the configured one and a life's suffix."""
        return sorted(await self._client.hkeys(self._keys.gateways))

    async def breakers(self) -> dict[str, str]:
        found: dict[str, str] = await self._client.hgetall(self._keys.breakers)
        return found

    async def forget_breakers(self) -> None:
        await self._client.delete(self._keys.breakers)

    async def forget_everything(self) -> None:
        """What FLUSHALL would do to the pool."""
        await self._client.eval(_FORGET, 0, self._keys.own_prefix.removesuffix("own:") + "*")

    async def all_keys(self) -> set[str]:
        """Of every pool."""
        return {key async for key in self._client.scan_iter("*")}

    async def in_flight(self, gateway: str) -> int:
        """The reservations of the gateway's lives together, by its configured id."""
        keys = [key async for key in self._client.scan_iter(self._keys.flight(f"{gateway}.*"))]
        return sum([await self._client.hlen(key) for key in keys])
