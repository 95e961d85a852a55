"""Redis' clock as scripts see it. Tests can step it."""

from __future__ import annotations

import redis.asyncio as redis

from bench.faults import stepped_clock
from tests.coordinator.stage import KEYS, hash_of, now_ms

HOUR_MS = 3_600_000


class Clock:
    """The offset of the clock is stored in a key."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    async def step(self, ms: int) -> None:
        await self._client.incrby(stepped_clock.OFFSET_KEY, ms)

    async def now_ms(self) -> int:
        return await now_ms(self._client) + int(await self._client.get(stepped_clock.OFFSET_KEY) or 0)

    async def left_ms(self, key: str, field: str, position: int = 1) -> int:
        """The time until the timestamp at this position of a record."""
        return int((await hash_of(self._client, key))[field].split(" ")[position]) - await self.now_ms()

    async def follow(self, name: str, is_relearning: int = 0) -> None:
        """Writes the result of an agent's heartbeat: the replica is exact."""
        until_ms = await self.now_ms() + 2000
        await self._client.hset(KEYS.agents, name, f"agent0 life1 {until_ms} session {is_relearning} 0 -1")
