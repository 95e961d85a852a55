"""Requests that wait: replicas with a cap, clients that keep them full, and what is judged of the queue.

The clients are a fixed number, so that requests wait all the time and the queue still has an end: if a fault takes one
replica of three away, half as many requests again wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.faults.redis import Line
from bench.faults.stage import Stage
from bench.faults.verdicts import Seen
from coordinator.errors import StoreError
from coordinator.keys import PoolKeys

CAP = 4
"""The requests that a replica serves at once."""
CLIENTS = 26
"""12 of their requests are served at once. Some 11 wait, and 16 when a replica is away."""
QUEUE_S = 2.5
"""The time in which two replicas serve the 16 requests that wait then: each takes 1.25 s."""
SETTINGS: dict[str, Any] = {"policy": {"max_active_requests": CAP}, "queue": {"wait_s": 60}}
"""The gateways' settings."""
CAP_AGAIN_WITHIN_S = 5.0
_LOOKS_PER_S, _ENGINE_LOOKS_PER_S = 20.0, 4.0
_ENGINE_ANSWERS_S = 1.0
_SETTLED_S = 0.5
"""After this time, the store knows that a request has ended."""
_OF_GATEWAYS = ("seats:*", "charges:*", "grants:*", "heard:*")
_OF_THE_QUEUE = ("waiting", "waiting_tokens", "fair", "paces", "turns:*", "line:*", *_OF_GATEWAYS)
_LEFT = """
local left = {}
for _, pattern in ipairs(ARGV) do
  for _, key in ipairs(redis.call('KEYS', pattern)) do
    left[#left + 1] = key
  end
end
return left
"""


@dataclass(frozen=True, slots=True)
class Look:
    """Requests in flight by replica, and seats, as the store had them at one time."""

    at_s: float
    active: dict[str, int]
    waiting: int


@dataclass
class QueueSampler:
    """Looks at the queue while `run` runs."""

    stage: Stage
    looks: list[Look] = field(default_factory=list)
    most_running: int = 0
    """The most requests that an engine said to have."""

    async def run(self) -> None:
        """Looks until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_at_store())
            for replica in self.stage.replicas:
                group.create_task(self._look_at_engine(replica))

    def waiting_at(self, at_s: float) -> int:
        """The number of seats at the last look before this time."""
        return next((look.waiting for look in reversed(self.looks) if look.at_s <= at_s), 0)

    async def _look_at_store(self) -> None:
        while True:
            try:
                active = await self.stage.line.ask("HGETALL", self.stage.keys.active)
                waiting = await self.stage.line.ask("HGETALL", self.stage.keys.waiting)
            except StoreError:
                pass
            else:
                self.looks.append(Look(self.stage.now_s(), counts_of(active), sum(counts_of(waiting).values())))
            await asyncio.sleep(1 / _LOOKS_PER_S)

    async def _look_at_engine(self, replica: str) -> None:
        url = f"{self.stage.replica_url(replica)}/sim/load"
        while True:
            try:
                async with asyncio.timeout(_ENGINE_ANSWERS_S), self.stage.http.get(url) as answer:
                    told = await answer.json()
                    self.most_running = max(self.most_running, told["running"] + told["waiting"])
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(1 / _ENGINE_LOOKS_PER_S)


def counts_of(flat: Sequence[bytes]) -> dict[str, int]:
    """The counts of a hash. A value that cannot be read is no count: KVGate takes it for 0 as well."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {name.decode(): int(value) for name, value in pairs if value.isdigit()}


def over_cap(looks: Iterable[Look], seen: Iterable[Seen], cap: int = CAP) -> list[float]:
    """The times at which replicas had more requests above their cap than gateways had placed without the store."""
    beside = [one for one in seen if one.state == "fallback"]
    found = []
    for look in looks:
        above = sum(max(0, count - cap) for count in look.active.values())
        if above and above > sum(one.sent_s <= look.at_s <= one.ended_s + _SETTLED_S for one in beside):
            found.append(look.at_s)
    return found


def waited(seen: Iterable[Seen]) -> tuple[int, int]:
    """How many requests waited, and how many the store has placed or let wait."""
    counts = Counter(one.waited_s > 0 for one in seen if one.state not in ("", "fallback") or one.waited_s > 0)
    return counts[True], counts.total()


async def requests_waiting(stage: Stage) -> int:
    """Raises StoreError."""
    return sum(counts_of(await stage.line.ask("HGETALL", stage.keys.waiting)).values())


async def queue_keys(line: Line, keys: PoolKeys) -> list[str]:
    """The keys of the queue that are still there, without the pool's prefix. Raises StoreError."""
    base = keys.waiting.removesuffix("waiting")
    left = await line.ask("EVAL", _LEFT, 0, *(f"{base}{name}" for name in _OF_THE_QUEUE))
    return sorted(key.decode().removeprefix(base) for key in left)
