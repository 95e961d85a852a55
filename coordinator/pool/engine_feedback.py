"""What an engine's answer to one request teaches, passed on to the map and to the agents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from coordinator.placement import Placement, PlaceRequest
from coordinator.pool.pool import Pool
from coordinator.registry import readable

_MEASURED_TTL_S = 60


def tell_measured(pool: Pool, request: PlaceRequest, placement: Placement, prompt_tokens: int) -> asyncio.Future[Any]:
    """Tell the map and the replica's agent how long a prompt was."""
    said = {"tip": request.tip, "prompt_tokens": prompt_tokens}
    told = orjson.dumps(said) if placement.is_told or _had_agent(pool, placement.replica) else b""
    return pool.run(
        "measure",
        replica=placement.replica,
        reservation=request.reservation,
        prompt_tokens=prompt_tokens,
        tip=request.tip,
        told=told,
        ttl_s=_MEASURED_TTL_S,
    )


def _had_agent(pool: Pool, replica: str) -> bool:
    """Whether the replica had an agent lately: this one, or the next, will want to know what was measured."""
    state = pool.state
    agent = state.agents.get(replica) if state is not None else None
    return state is not None and agent is not None and agent.lease_until_ms > state.now_ms - _MEASURED_TTL_S * 1000


async def is_unchanged(pool: Pool, replica: str, key: str, entry: str) -> bool:
    """Whether the map still calls `key` resident by that entry, while a live agent follows the replica, and has told
    all that it knows. Raises StoreError."""
    if pool.state is None or not pool.state.is_told(replica):
        return False
    k = pool.keys
    restating, record = await asyncio.gather(
        pool.read("HGET", k.restating, replica), pool.read("HGET", k.own(key), replica)
    )
    if restating or not record:
        return False
    fields = readable(record).split(" ")
    return fields[1:2] == ["resident"] and fields[6:7] == [entry]


def void(pool: Pool, request: PlaceRequest, replica: str, keys: Sequence[str]) -> None:
    """The engine does not serve these keys of the request, although it has computed them: nothing that the map says of
    them there counts any more. Its agent forgets them until events name them again."""
    pool.claims.void(replica, keys)
    if _had_agent(pool, replica):
        told = orjson.dumps({"void": list(keys)})
        asked = {"reservation": "", "prompt_tokens": 0, "tip": request.tip, "told": told, "ttl_s": _MEASURED_TTL_S}
        pool.run("measure", replica=replica, **asked)


def ask_reset(pool: Pool, replica: str) -> None:
    """The engine lacks blocks that its events announced, and no event has said so: its agent must begin anew."""
    pool.read("HSET", pool.keys.asks, replica, "reset")
