"""Gateways that died lately, for people. One that ends as it should, or lives again, is not among them."""

from __future__ import annotations

from contextlib import suppress

from coordinator.errors import StoreRefused
from coordinator.pool.pool import Pool
from coordinator.registry import is_number, readable, time_ms

REMEMBERED_S = 900


async def note_lost(pool: Pool, gateway: str) -> None:
    """The gateway was reaped: remember when. Does nothing if it lives again. Raises StoreError."""
    if await pool.read("HGET", pool.keys.gateways, gateway) is not None:
        return
    now_ms = time_ms(await pool.read("TIME"))
    with suppress(StoreRefused):  # the store is full, or somebody else wrote there: reaping is worth more
        await pool.read("HSET", pool.keys.lost_gateways, gateway, now_ms)
        await pool.read("EXPIRE", pool.keys.lost_gateways, REMEMBERED_S)


async def read_lost(pool: Pool) -> dict[str, int]:
    """Which gateways died within REMEMBERED_S, and when they were reaped (ms of Redis time). Raises StoreError."""
    try:
        flat = await pool.read("HGETALL", pool.keys.lost_gateways)
    except StoreRefused:  # it is no hash
        return {}
    now_ms = pool.state.now_ms if pool.state is not None else 0
    found = {readable(name): int(at) for name, at in zip(flat[::2], flat[1::2], strict=True) if is_number(at)}
    return {name: at_ms for name, at_ms in found.items() if at_ms > now_ms - 1000 * REMEMBERED_S}
