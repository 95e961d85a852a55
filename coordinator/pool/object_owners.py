"""Which replica keeps an object that it made: a stored response, a video, a file, a batch, a voice. Only that one can
continue, show or delete it."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from coordinator.pool.pool import Pool
from coordinator.registry import readable

RESPONSE_TTL_S = 3600
OBJECT_TTL_S = 24 * 3600
_EVERYBODY = "-"


class Owner(NamedTuple):
    """The replica that made an object, and its incarnation then."""

    replica: str
    incarnation: str
    is_callers: bool
    """Whether it was made for the tenant that asks."""


def remember(pool: Pool, name: str, replica: str, incarnation: str, tenant: str | None) -> asyncio.Future[Any]:
    """Write the owner down. The command leaves at once: the client's next request may reach another gateway. A `name`
    is a response's id, or `<kind>/<id>` of another object."""
    place, ttl_s = f"{replica} {incarnation} {tenant or _EVERYBODY}", OBJECT_TTL_S if "/" in name else RESPONSE_TTL_S
    return pool.read("SET", pool.keys.response(name), place, "EX", ttl_s, at_once=True)


async def find(pool: Pool, name: str, tenant: str | None) -> Owner | None:
    """Who made it; None if that is unknown. Raises StoreError."""
    found = await pool.read("GET", pool.keys.response(name))
    words = readable(found).split(" ", 2) if found is not None else []
    if len(words) < 3:  # no gateway wrote it
        return None
    return Owner(words[0], words[1], words[2] == (tenant or _EVERYBODY))
