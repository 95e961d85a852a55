"""Whether LMCache has stored in this Redis what a replica has computed of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.pool.pool import Pool
from coordinator.pool.prefills import is_computed
from coordinator.registry import ReplicaRecord, readable

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.05


async def until_stored(pool: Pool, keys: Sequence[str], matched_keys: int, replica: ReplicaRecord) -> bool:
    """Waits until a replica holds the prompt with these keys, as its agent has heard, and until the chunks that it has
    computed of it are in Redis, as far as agents have named them. Of the first `matched_keys` it had the cache before.
    If a chunk of these is missing, nobody stores it again, so the others cannot be loaded: False. Raises StoreError.
    """
    tip, pause_s = pool.keys.own(keys[-1]), _FIRST_PAUSE_S
    while not is_computed(await pool.read("HGET", tip, replica.replica), replica):
        pause_s = await _paused(pause_s)
    named = [pool.keys.chunk(key) for key in keys]
    chunks = [readable(each).partition(" ")[2] if each is not None else "" for each in await pool.read("MGET", *named)]
    old, new = [list(filter(None, part)) for part in (chunks[:matched_keys], chunks[matched_keys:])]
    if old and await pool.read("EXISTS", *old) < len(old):
        return False
    while new and (not await pool.read("EXISTS", new[-1]) or await pool.read("EXISTS", *new) < len(new)):
        pause_s = await _paused(pause_s)
    return True


async def _paused(pause_s: float) -> float:
    """Lets the time pass. Returns the next one."""
    await asyncio.sleep(pause_s)
    return min(2 * pause_s, _LONGEST_PAUSE_S)
