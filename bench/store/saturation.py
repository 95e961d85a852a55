"""Measures the placements/s of one Redis: gateways send as fast as it answers, each in its own process."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any

from bench.embedded import Load, connect, open_pool, usage
from bench.store.beside import Found, Start, company
from bench.store.requests import Gateway

POOL = "bench-saturation"
REPLICAS = 8
_AT_ONCE = 32
"""A gateway's requests that wait for the store at a time. Redis never has to wait for requests."""


@dataclass(frozen=True)
class Saturation:
    """One run. Redis was the limit if it ran or waited for a core all of the time."""

    gateways: int
    placements_per_s: float
    redis: Load
    gateway_cpu_share: float
    """The busiest gateway's share of one core. At 1, the gateways were the limit."""

    @property
    def redis_us(self) -> float:
        """Redis' CPU time for a placement, with its settles and holds, and the sockets."""
        return self.redis.cpu_share / max(1e-9, self.placements_per_s) * 1e6

    @property
    def ceiling_per_s(self) -> float:
        """Placements/s of a Redis with its own core, from its CPU time per placement here."""
        return 1e6 / max(1e-9, self.redis_us)

    def as_dict(self, gateway_per_s: float) -> dict[str, Any]:
        """The row for JSON. A gateway at saturation makes `gateway_per_s` placements."""
        return asdict(self) | {
            "redis_us": self.redis_us,
            "ceiling_per_s": self.ceiling_per_s,
            "gateway_per_s": gateway_per_s,
            "gateways_worth": self.placements_per_s / gateway_per_s,
            "gateways_worth_with_a_core": self.ceiling_per_s / gateway_per_s,
        }


async def place_all_the_time(start: Start, url: str, seconds: float, number: int) -> Found:
    """A gateway at saturation, in its own process."""
    wire, pool = await open_pool(url, POOL, f"gateway-{number}.bench0", REPLICAS)
    gateway = Gateway(pool)
    await gateway.learn()
    await start()
    loop = asyncio.get_running_loop()
    placed, end_s, used_s = 0, loop.time() + seconds, time.process_time()

    async def client() -> None:
        nonlocal placed
        while True:
            await gateway.serve()
            if loop.time() >= end_s:
                return
            placed += 1

    async with asyncio.TaskGroup() as clients:
        for _ in range(_AT_ONCE):
            clients.create_task(client())
    used_s = time.process_time() - used_s
    await wire.close()
    return {"placed": placed, "cpu_share": used_s / seconds}


async def saturate(url: str, gateways: int, seconds: float) -> Saturation:
    """Placements/s of this many gateways together, and Redis' usage for them."""
    wire = await connect(url)
    try:
        with company(place_all_the_time, url, seconds, list(range(gateways))) as others:
            await others.start()
            before = await usage(wire)
            await asyncio.sleep(seconds)
            load = (await usage(wire)).since(before)
            found = await others.found()
    finally:
        await wire.close()
    placed, busiest = sum(each["placed"] for each in found), max(each["cpu_share"] for each in found)
    return Saturation(gateways, placed / seconds, load, busiest)
