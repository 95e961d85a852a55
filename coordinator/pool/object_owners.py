"""Which replica keeps a stored response (POST /v1/responses with `store`): only that one can continue or cancel it."""

from __future__ import annotations

import asyncio
from typing import Any

from coordinator.pool.pool import Pool
from coordinator.registry import readable

RESPONSE_TTL_S = 3600
_EVERYBODY = "-"


def remember(pool: Pool, response_id: str, replica: str, incarnation: str, tenant: str | None) -> asyncio.Future[Any]:
    """Write the owner down. The command leaves at once: the client's next request may reach another gateway."""
    place = f"{replica} {incarnation} {tenant or _EVERYBODY}"
    return pool.read("SET", pool.keys.response(response_id), place, "EX", RESPONSE_TTL_S, at_once=True)


async def find(pool: Pool, response_id: str, tenant: str | None) -> tuple[str, str] | None:
    """The replica and incarnation that made it for this tenant; None if unknown. Raises StoreError."""
    found = await pool.read("GET", pool.keys.response(response_id))
    if found is None:
        return None
    words = readable(found).split(" ", 2)  # fewer than three if no gateway wrote it
    return (words[0], words[1]) if words[2:] == [tenant or _EVERYBODY] else None
