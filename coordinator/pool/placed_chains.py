"""The chains of requests, which placements write down for agents and for the reaper.

They are in two hashes, `bound:0` and `bound:1`, which take turns: `place` writes into one for a minute, then empties
the other and goes on there. So each chain is there for one to two minutes. The hashes have no TTL: a Redis full of
chunks would evict keys that have one, before the agents have read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from coordinator.keys import PoolKeys
from coordinator.registry import is_number

_SLOTS = (0, 1)
_SINCE = "@"
"""The field that holds the number of a hash's turn."""


async def read_chains(ask: Callable[..., Awaitable[Any]], keys: PoolKeys, tips: Sequence[str]) -> list[bytes | None]:
    """The chain that was written last for each tip; None if there is none any more. `ask(*command)` asks Redis."""
    found = await asyncio.gather(*(ask("HMGET", keys.bound_slot(slot), _SINCE, *tips) for slot in _SLOTS))
    newest_first = sorted((told for told in found if is_number(told[0] or b"")), key=lambda told: -int(told[0]))
    return [next((told[1 + i] for told in newest_first if told[1 + i] is not None), None) for i in range(len(tips))]
