"""Troubles that last for a while and are over afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.cluster import SimReplica
from tests.chaos.truth_stage import TruthStage
from tests.polling import eventually


@asynccontextmanager
async def only_one_healthy(truth: TruthStage, replica: SimReplica) -> AsyncIterator[None]:
    """Makes the other replicas report that they are unhealthy, so that only this replica gets requests."""
    others = [other for other in truth.cluster.replicas if other is not replica]
    await asyncio.gather(*(truth.fail(other, "unhealthy", count=-1) for other in others))
    try:
        await eventually(lambda: _have_state(truth, others, "dead"))
        yield
    finally:
        await asyncio.gather(*(truth.fail(other, "none") for other in others))
    await eventually(lambda: _have_state(truth, others, "ready"))


async def _have_state(truth: TruthStage, replicas: Sequence[SimReplica], state: str) -> bool:
    known = await truth.ledger.replicas()
    return all(known[replica.id].state == state for replica in replicas)
