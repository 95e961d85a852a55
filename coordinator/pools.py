"""Which pools there are: `kvgate:pools`, the only key that belongs to none of them."""

from __future__ import annotations

from coordinator.errors import StoreError
from coordinator.keys import POOLS
from coordinator.store import Store


async def known_pools(store: Store) -> list[str]:
    """The pools that any agent has ever told of; empty while the store is away."""
    try:
        return sorted(name.decode() for name in await store.ask("SMEMBERS", POOLS))
    except StoreError:
        return []
