"""Gateways die between reading an event and applying it: no event is applied twice or lost."""

from __future__ import annotations

from tests.chaos.truth_load import Askers
from tests.chaos.truth_stage import TruthStage
from tests.polling import eventually

ROUNDS = 4


async def test_gateways_that_are_killed_with_events_in_hand_leave_the_map_exact(truth: TruthStage) -> None:
    texts = [truth.new_prompt() for _ in range(30)]
    async with Askers(truth, texts, clients=4, gateways_may_die=True) as askers:
        for number in range(ROUNDS):
            gateway = truth.cluster.gateway_processes[number % 2]
            await eventually(lambda id_=gateway.id: applies(truth, id_))
            before = len(askers.answers)
            await eventually(lambda before=before: len(askers.answers) > before + 20)
            gateway.kill()
            gateway.start()
    assert askers.died > 0
    await eventually(truth.is_exact_everywhere)
    await truth.settle(texts, claims=False)  # a dead gateway's last claims stay in the map for a while
    for replica in truth.cluster.replicas:
        await eventually(lambda name=replica.id: is_all_applied(truth, name))


async def applies(truth: TruthStage, gateway: str) -> bool:
    """Whether this gateway applies any replica's events."""
    leases = await truth.client.hgetall(truth.keys.leases)
    return any(name.startswith("events:") and lease.startswith(f"{gateway}.") for name, lease in leases.items())


async def is_all_applied(truth: TruthStage, replica: str) -> bool:
    cursor = await truth.client.hget(truth.keys.cursors, replica)
    return cursor.split(" ")[1] == await truth.client.hget(truth.keys.entries, replica)
