"""The chains of requests, as placements wrote them down for agents and for the reaper.

They live in two hashes, `bound:0` and `bound:1`, that take turns: `place` writes into one for a minute, and empties the
other when its turn comes. So each is there for one to two minutes, and none has a TTL, by which a Redis full of chunks
would evict it before its agent has read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from coordinator.keys import PoolKeys
from coordinator.registry import is_number

_SLOTS = (0, 1)
_SINCE = "@"
"""The field that says of when a hash is."""


async def read_chains(ask: Callable[..., Awaitable[Any]], keys: PoolKeys, tips: Sequence[str]) -> list[bytes | None]:
    """What was written last of each tip; None where nothing was, or it is too old. `ask(*command)` asks Redis."""
    found = await asyncio.gather(*(ask("HMGET", keys.bound_slot(slot), _SINCE, *tips) for slot in _SLOTS))
    newest_first = sorted((told for told in found if is_number(told[0] or b"")), key=lambda told: -int(told[0]))
    return [next((told[1 + i] for told in newest_first if told[1 + i] is not None), None) for i in range(len(tips))]
