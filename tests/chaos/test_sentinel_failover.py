"""Redis behind sentinels: when a master dies or freezes, gateways move to the next master, and no request fails."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Daemon, running_cluster
from tests.chaos import truth_stage
from tests.chaos.truth_stage import TruthStage
from tests.cluster.clients import Load, held_stream, running_load
from tests.cluster.ledger import Ledger
from tests.forked import GLASS_REPLICA
from tests.polling import eventually
from tests.redis_groups import MASTER, SentinelGroup, client_of, running_sentinels

pytestmark = pytest.mark.slow

# One token of an answer takes 50 ms.
REPLICA_ARGUMENTS = (*truth_stage.REPLICA_ARGUMENTS, "--decode-s-per-token", "1")
LONGER_THAN_A_TEST_TOKENS = 1000
BACK_WITHIN_S = 60.0
"""A master counts as down after half a second, the failover takes up to two, and a heartbeat on the new master half
a second. The rest is for a busy machine."""


@pytest.fixture(scope="module")
def group() -> Iterator[SentinelGroup]:
    with running_sentinels() as group:
        yield group


@pytest.fixture(scope="module")
def cluster(group: SentinelGroup) -> Iterator[TruthStage]:
    with running_cluster(
        gateways=2,
        replicas=3,
        replica_arguments=REPLICA_ARGUMENTS,
        replica_command=GLASS_REPLICA,
        config=truth_stage.CONFIG,
        redis_url=group.url,
    ) as cluster:
        yield TruthStage(cluster, group.servers[0])


@pytest.fixture
async def truth(cluster: TruthStage, group: SentinelGroup) -> AsyncIterator[TruthStage]:
    group.heal()
    await eventually(group.is_whole)
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_keepalive_connections=None)) as http:
        cluster.http = http
        async with looking_at_the_master(cluster, group):
            await eventually(cluster.is_exact_everywhere)
        yield cluster
        async with looking_at_the_master(cluster, group):
            await eventually(cluster.all_load_is_given_back)


@asynccontextmanager
async def looking_at_the_master(truth: TruthStage, group: SentinelGroup) -> AsyncIterator[None]:
    """Reads the store directly, on the server that is the master now."""
    await eventually(group.has_settled, within_s=BACK_WITHIN_S)
    async with redis.Redis(port=group.master().port, decode_responses=True, protocol=2) as client:
        truth.client, truth.ledger = client, Ledger(client, truth.cluster.pool)
        yield


@contextmanager
def frozen(*daemons: Daemon) -> Iterator[None]:
    for daemon in daemons:
        daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for daemon in daemons:
            daemon.signal(signal.SIGCONT)


async def served(load: Load, state: str, requests: int = 30) -> None:
    """Wait until the load has had this many more answers that were placed in this state."""
    before = load.states[state]
    await eventually(lambda: load.states[state] >= before + requests, within_s=BACK_WITHIN_S)


async def is_shared_by_all_gateways(truth: TruthStage) -> None:
    """A prompt that one gateway placed is a hit through the other."""
    text = truth.new_prompt()
    first = await truth.ask(text, gateway=0)
    again = await truth.ask(text, gateway=1)
    assert first.decision.startswith("cold")
    assert again.decision.startswith("hit")
    assert first.replica == again.replica


async def test_a_master_killed_under_load_is_followed_to_its_successor(truth: TruthStage, group: SentinelGroup) -> None:
    async with looking_at_the_master(truth, group):
        texts = await truth.warm(3)
    async with held_stream(truth.http, truth.urls[0], truth.new_prompt(), LONGER_THAN_A_TEST_TOKENS):
        async with running_load(Load(truth.http, truth.urls)) as load:
            await served(load, "exact")
            old = group.master()
            old.kill()
            await served(load, "fallback", requests=5)
            await served(load, "exact")
            old.start()  # empty, and still configured as a master
            async with looking_at_the_master(truth, group):
                await eventually(truth.is_exact_everywhere, within_s=BACK_WITHIN_S)
            await served(load, "exact")
        assert load.failures == []
        async with looking_at_the_master(truth, group):
            assert group.master() is not old
            with client_of(old) as client:
                assert client.keys("kvgate:*") == []
            await eventually(lambda: is_counted(truth, 1))
            await truth.settle(texts)
    await is_shared_by_all_gateways(truth)


async def test_a_master_that_comes_back_from_a_freeze_is_left_by_those_who_froze_with_it(
    truth: TruthStage, group: SentinelGroup
) -> None:
    """As when one host, or one side of a network, freezes: for a while there are two masters."""
    async with looking_at_the_master(truth, group):
        texts = await truth.warm(3)
    old, there = group.master(), (truth.cluster.gateway_processes[1], truth.cluster.agent("r1"))
    async with held_stream(truth.http, truth.urls[1], truth.new_prompt(), LONGER_THAN_A_TEST_TOKENS) as stream:
        async with running_load(Load(truth.http, truth.urls[:1])) as load:
            await served(load, "exact")
            old.pause()
            with frozen(*there):
                await served(load, "fallback", requests=5)
                await served(load, "exact", requests=5)
                old.resume()
        async with looking_at_the_master(truth, group):
            async with running_load(Load(truth.http, truth.urls, seed=2)) as both:
                await eventually(truth.is_exact_everywhere, within_s=BACK_WITHIN_S)
                with client_of(old) as client:
                    assert client.role()[0] == "master", "nobody was told otherwise yet"
                await served(both, "exact")
            assert load.failures == both.failures == []
            assert await stream.goes_on()
            await eventually(lambda: is_counted(truth, 1))
            await truth.settle(texts)
    await is_shared_by_all_gateways(truth)


async def is_counted(truth: TruthStage, requests: int) -> bool:
    sums = await truth.ledger.sums()
    assert not sums.problems(), sums.problems()
    return sums.total == requests


async def test_a_planned_failover_under_load_fails_no_request(truth: TruthStage, group: SentinelGroup) -> None:
    """The old master becomes a replica, and the sentinels close its connections."""
    async with running_load(Load(truth.http, truth.urls)) as load:
        await served(load, "exact")
        old = group.master()
        with client_of(group.sentinels[0]) as sentinel:
            sentinel.execute_command("SENTINEL FAILOVER", MASTER)
        await eventually(lambda: group.master() is not old, within_s=BACK_WITHIN_S)
        async with looking_at_the_master(truth, group):
            await eventually(truth.is_exact_everywhere, within_s=BACK_WITHIN_S)
        await served(load, "exact")
    assert load.failures == []
    await is_shared_by_all_gateways(truth)
