"""Which pools a cluster has: the set `kvgate:pools`, which belongs to none of them."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.keys import PoolKeys, is_pool, pools_key
from coordinator.redis.address import connect
from coordinator.redis.time_limit import answered
from coordinator.registry import readable


def pool_names(members: Iterable[bytes]) -> list[str]:
    """The members of `kvgate:pools` that name a pool, sorted."""
    return sorted(name for name in map(readable, members) if is_pool(name))


async def list_pool(url: str, keys: PoolKeys, within_s: float) -> None:
    """Make a pool known, over a connection of its own: in a Redis Cluster the key may be on any node. Raises
    StoreError."""
    pools = pools_key(keys.namespace)
    wire = await connect(url, pools, within_s, lambda _error: None)
    try:
        await answered(wire.send("SADD", pools, keys.pool), within_s)
    finally:
        await wire.close()
