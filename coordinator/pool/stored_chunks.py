"""Whether LMCache has stored in this Redis what a replica has computed of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.pool.pool import Pool
from coordinator.registry import readable

_RESIDENT = "resident"


async def are_stored(pool: Pool, keys: Sequence[str], replica: str, incarnation: str) -> bool:
    """Whether the replica holds the whole prompt with these keys, as its agent has heard, and all chunks of the prompt
    that agents have named are in Redis. Raises StoreError."""
    record = await pool.read("HGET", pool.keys.own(keys[-1]), replica)
    if record is None or readable(record).split(" ")[:2] != [incarnation, _RESIDENT]:
        return False
    named = await pool.read("MGET", *(pool.keys.chunk(key) for key in keys))
    chunks = [readable(each).partition(" ")[2] for each in named if each is not None]
    return not chunks or await pool.read("EXISTS", *chunks) == len(chunks)
