"""The store is away, comes back empty, or gets events faster than gateways read them: the map is right afterwards."""

from __future__ import annotations

import asyncio

from bench.cluster import SimReplica
from tests.chaos.truth_check import Told
from tests.chaos.truth_load import Askers
from tests.chaos.truth_stage import TruthStage
from tests.polling import eventually

AWAY_S = 7.0
"""Longer than every lease: the longest one, of a subset, lasts 5 s."""


async def test_a_store_that_hung_is_told_what_changed_meanwhile(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    old, kept = await truth.old_and_kept(r0)
    async with Askers(truth, [truth.new_prompt(words=20) for _ in range(3)]) as askers:
        truth.redis.pause()
        try:
            await while_it_is_away(truth, r0, askers)
        finally:
            truth.redis.resume()
        await eventually(truth.is_exact_everywhere)
        await truth.settle([old, *kept])
    assert await truth.owners(old) == set()


async def test_a_store_that_comes_back_empty_is_told_everything(truth: TruthStage) -> None:
    r0 = truth.replica("r0")
    old, kept = await truth.old_and_kept(r0)
    async with Askers(truth, [truth.new_prompt(words=20) for _ in range(3)]) as askers:
        truth.redis.kill()
        try:
            await while_it_is_away(truth, r0, askers)
        finally:
            truth.redis.start()
        await eventually(truth.is_exact_everywhere)
        await truth.settle([old, *kept])
    assert await truth.owners(old) == set()
    assert [await truth.owners(text) for text in kept] == [{"r0"}] * len(kept)


async def test_a_store_that_comes_back_as_it_was_earlier_is_told_what_changed_since(truth: TruthStage) -> None:
    """A lagging replica that becomes the master has such older data: cursors, entries' numbers and lives go back."""
    r0, r1, r2 = truth.cluster.replicas
    old, kept = await truth.old_and_kept(r0)
    gone = await truth.warm(2, r2)
    async with Askers(truth, [truth.new_prompt(words=20) for _ in range(3)]) as askers:
        with truth.redis.going_back_to_now():
            new = await truth.warm(2, r1)
            await truth.crowd_out(r0)
            await truth.restart(r2)
            later = [truth.new_prompt() for _ in range(2)]
            for text in later:
                await truth.ask_on(r2, text)
            await truth.settle(later, complete=False)
            for text in later:  # what no agent has confirmed is lost with the store
                await eventually(lambda text=text: is_confirmed(truth, r2, text))
            told = await truth.client.hgetall(truth.keys.entries)
            truth.redis.kill()
            await eventually(lambda: "state=fallback" in askers.answers[-1].decision)
            truth.redis.start()
        assert (await truth.client.hgetall(truth.keys.entries)) != told
        await eventually(truth.is_exact_everywhere)
        await truth.settle([old, *kept, *gone, *new])
        await truth.settle(later, complete=False)  # their lengths were never published, or are lost
        for text in later:
            await eventually(lambda text=text: is_confirmed(truth, r2, text))
    assert await truth.owners(old) == set()
    assert [await truth.owners(text) for text in gone] == [set()] * 2
    assert [await truth.owners(text) for text in new] == [{"r1"}] * 2


async def is_confirmed(truth: TruthStage, replica: SimReplica, text: str) -> bool:
    """Whether the replica's agent has said that the replica holds some of a prompt."""
    told = (await truth.told(text))[1].get(replica.id, Told())
    return any(record["kind"] == "resident" for record in told.records)


async def while_it_is_away(truth: TruthStage, replica: SimReplica, askers: Askers) -> None:
    """Changes the replica's cache while the store is away and requests are still served."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + AWAY_S
    await eventually(lambda: askers.answers and "state=fallback" in askers.answers[-1].decision)
    await truth.crowd_out(replica)
    await asyncio.sleep(until_s - loop.time())
