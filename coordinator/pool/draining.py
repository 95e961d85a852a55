"""Drains replicas: a drained one gets no new requests, and its keys are forgotten when those that it has are over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

from coordinator.pool.pool import Pool
from coordinator.registry import readable

_MOVE = " move"


@dataclass(frozen=True, slots=True)
class Drained:
    """A replica after the call."""

    state: str
    """Its state from now on; empty if the pool does not know it."""
    active: int
    """Its requests in flight."""


async def drain(
    run: Callable[..., Awaitable[Any]], replica: str, *, is_over: bool = False, moves: bool = False
) -> Drained:
    """Drain a replica in its present incarnation, or let it have requests again if the drain `is_over`. With `moves`,
    its requests that can go on elsewhere do. Harmless when repeated. `run` runs a script. Raises StoreError."""
    state, active = await run("drain", replica=replica, is_over=is_over, moves=moves)
    if is_over:
        await run("settle", gateway="", sums="", settled=[("room", replica, "")])
    return Drained(readable(state), int(active))


async def moving(pool: Pool, replicas: Collection[str]) -> set[str]:
    """Those of these drained replicas whose requests are to go on elsewhere. Raises StoreError."""
    names = list(replicas)
    told = await pool.read("HMGET", pool.keys.draining, *names)
    return {name for name, text in zip(names, told, strict=True) if readable(text or b"").endswith(_MOVE)}
