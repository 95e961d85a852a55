"""Gateways that died lately, for people: by the id of their configuration, behind which each start adds a suffix. One
that lives again, or ends as it should, is not among them.
"""

from __future__ import annotations

from contextlib import suppress

from coordinator.errors import StoreRefused
from coordinator.pool.pool import Pool
from coordinator.registry import is_number, readable, time_ms

REMEMBERED_S = 900


async def note_lost(pool: Pool, gateway: str) -> None:
    """The gateway was reaped: remember when. Does nothing if it, or another one with its id, lives. Raises
    StoreError."""
    known = await pool.read("HKEYS", pool.keys.gateways)
    if _configured(gateway) in {_configured(readable(name)) for name in known}:
        return
    key, now_ms = pool.keys.lost_gateways, time_ms(await pool.read("TIME"))
    with suppress(StoreRefused):  # the store is full, or somebody else wrote there: reaping is worth more
        await pool.read("HSET", key, _configured(gateway), now_ms)
        await pool.read("EXPIRE", key, REMEMBERED_S)
        for name, at_ms in (await _all(pool)).items():
            if _is_over(at_ms, now_ms):
                await pool.read("HDEL", key, name)


async def forget_lost(pool: Pool) -> None:
    """This gateway has registered: it is not lost. Raises StoreError."""
    with suppress(StoreRefused):
        await pool.read("HDEL", pool.keys.lost_gateways, _configured(pool.gateway))


async def read_lost(pool: Pool) -> dict[str, int]:
    """Which gateways died within REMEMBERED_S, and when they were reaped (ms of Redis time). Raises StoreError."""
    now_ms = pool.state.now_ms if pool.state is not None else 0
    return {name: at_ms for name, at_ms in (await _all(pool)).items() if not _is_over(at_ms, now_ms)}


async def _all(pool: Pool) -> dict[str, int]:
    try:
        flat = await pool.read("HGETALL", pool.keys.lost_gateways)
    except StoreRefused:  # it is no hash
        return {}
    return {readable(name): int(at) for name, at in zip(flat[::2], flat[1::2], strict=True) if is_number(at)}


def _is_over(at_ms: int, now_ms: int) -> bool:
    return at_ms <= now_ms - 1000 * REMEMBERED_S


def _configured(gateway: str) -> str:
    return gateway.rpartition(".")[0] or gateway
