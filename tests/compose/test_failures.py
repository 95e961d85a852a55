"""Processes are killed under load. They serve again after Docker or the test restarts them."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.cluster.clients import Load, ask, is_complete, prose, running_load
from tests.compose.cluster import ComposeCluster
from tests.polling import eventually

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

CLIENTS = 6
MAX_TOKENS = (1, 60)


async def test_what_a_killed_gateway_had_not_begun_to_answer_another_answers(
    cluster: ComposeCluster, http: httpx.AsyncClient
) -> None:
    victim, other = await cluster.containers("gateway")
    asked = [asyncio.ensure_future(ask(http, cluster.url, prose(f"unbegun {n}", 20), max_tokens=250)) for n in range(4)]

    async def both_are_busy() -> bool:
        return all([await cluster.metric(gateway, "kvgate_requests_in_flight") == 2 for gateway in (victim, other)])

    await eventually(both_are_busy)
    await cluster.crash(victim)
    answers = await asyncio.gather(*asked)
    assert all(is_complete(answer) for answer in answers)


async def test_a_gateway_killed_under_load_costs_only_streams_that_it_carried_and_comes_back(
    cluster: ComposeCluster, http: httpx.AsyncClient
) -> None:
    victim = (await cluster.containers("gateway"))[0]
    restarts = (await cluster.inspect(victim))["RestartCount"]

    async def serves_again() -> bool:
        found = await cluster.inspect(victim)
        is_back = found["RestartCount"] > restarts and found["State"]["Health"]["Status"] == "healthy"
        return is_back and (await cluster.chats_answered())[victim] > 0

    async with running_load(Load(http, [cluster.url], max_tokens=MAX_TOKENS), CLIENTS) as load:
        await eventually(lambda: load.answered > 50, 30)
        await cluster.crash(victim)
        killed_at = load.answered
        await eventually(serves_again, 60)
        await eventually(lambda: load.answered > killed_at + 50, 30)
    # Each client may lose at most one stream, which had begun.
    assert [failure for failure in load.failures if "incomplete chunked read" not in failure] == []
    assert len(load.failures) <= CLIENTS
    assert load.broken == 0


async def test_while_a_replica_is_dead_requests_go_elsewhere_and_it_serves_again_when_it_is_back(
    cluster: ComposeCluster, http: httpx.AsyncClient
) -> None:
    text = prose("held by the victim")
    victim = (await ask(http, cluster.url, text)).headers["x-kvgate-replica"]
    service = f"replica-{victim.removeprefix('r')}"
    async with running_load(Load(http, [cluster.url], max_tokens=MAX_TOKENS), CLIENTS) as load:
        await eventually(lambda: load.answered > 50, 30)
        await cluster.kill(service)
        elsewhere = await ask(http, cluster.url, text)
        assert is_complete(elsewhere)
        assert elsewhere.headers["x-kvgate-replica"] != victim
        killed_at = load.answered
        await eventually(lambda: load.answered > killed_at + 50, 30)
        await cluster.up()

        async def is_ready_again() -> bool:
            ready = [
                cluster.metric(gateway, "kvgate_replica_ready", replica=victim)
                for gateway in await cluster.containers("gateway")
            ]
            return all(await asyncio.gather(*ready))

        await eventually(is_ready_again, 30)

        async def is_chosen_again() -> bool:
            answer = await ask(http, cluster.url, prose(f"new at {load.answered}"))
            return answer.headers["x-kvgate-replica"] == victim

        await eventually(is_chosen_again, 30)
    assert load.failures == []


async def test_redis_killed_under_load_fails_no_request_and_the_store_comes_back(
    cluster: ComposeCluster, http: httpx.AsyncClient
) -> None:
    async def stores_up() -> float:
        up = [cluster.metric(gateway, "kvgate_store_up") for gateway in await cluster.containers("gateway")]
        return sum(await asyncio.gather(*up))

    async with running_load(Load(http, [cluster.url], max_tokens=MAX_TOKENS), CLIENTS) as load:
        await eventually(lambda: load.answered > 50, 30)
        await cluster.kill("redis")
        fallbacks = load.states["fallback"]
        await eventually(lambda: load.states["fallback"] > fallbacks + 50, 30)
        assert await stores_up() == 0
        await cluster.up()

        async def are_both_up() -> bool:
            return await stores_up() == 2

        await eventually(are_both_up, 30)
        exact = load.states["exact"]
        await eventually(lambda: load.states["exact"] > exact + 50, 60)
    assert load.failures == []
    assert load.broken == 0
