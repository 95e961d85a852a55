"""The progress that a replica shows: the answers that it sends, as gateways tell one another, and the work of its
engine, as its agent tells it. A replica that shows none hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from coordinator.pool.pool import Pool
from coordinator.registry import AgentRecord, ReplicaFigures, each


def write_progress(pool: Pool, pieces: Mapping[str, int]) -> None:
    """Write how many pieces of answers each replica has sent this gateway until now."""
    fields = [text for replica, count in pieces.items() for text in (replica, f"{pool.gateway} {count}")]
    pool.read("HSET", pool.keys.progress, *fields)


async def read_progress(pool: Pool, replica: str) -> tuple[bytes | None, int, dict[str, float]]:
    """What a gateway wrote last for this replica, the number of its engine's last event (-1 if not known), and its
    engine's counters. While all stay the same, the replica has sent nobody anything, and its engine has done nothing.
    Raises StoreError."""
    k = pool.keys
    last_shared, agent, counters = await asyncio.gather(
        *(pool.read("HGET", key, replica) for key in (k.progress, k.agents, k.engines))
    )
    agents = each((replica.encode(), agent or b""), lambda _, text: AgentRecord.parse(text))
    seq = agents[replica].seq if replica in agents else -1
    return last_shared, seq, ReplicaFigures.parse((), (replica.encode(), counters or b"")).engines.get(replica, {})
