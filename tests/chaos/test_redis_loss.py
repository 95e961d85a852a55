"""No request fails when Redis hangs, dies or is emptied. Gateways fall back to a shared rule and return by themselves.

Afterwards the counts are exactly the live requests: no earlier request stays counted, and no live request is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from coordinator.store_connection import BREAKER_MISSES
from tests.chaos.stage import BUDGET_S, Stage
from tests.cluster.clients import HeldStream, Load, ask, held_stream, is_complete, running_load
from tests.cluster.gateways import GatewayProcess, another_gateway, configured_like, started_gateway
from tests.polling import eventually

LONGER_THAN_A_LEASE_S = 3.5


class Streams:
    """Streams through every gateway that last longer than the test."""

    def __init__(self, stage: Stage, stack: AsyncExitStack) -> None:
        self._stage = stage
        self._stack = stack
        self.open: list[HeldStream] = []

    async def add(self) -> None:
        """Opens one more stream through each gateway."""
        for url in self._stage.urls:
            stream = held_stream(self._stage.http, url, self._stage.new_prompt())
            self.open.append(await self._stack.enter_async_context(stream))

    async def are_counted_exactly(self) -> None:
        """Checks that the load equals the open streams, closes them, and checks that the load returns to zero."""
        await eventually(lambda: self._stage.active_is(len(self.open)))
        assert sum((await self._stage.ledger.sums()).backlog_tokens.values()) == 0
        while self.open:
            await self.open.pop().hang_up()
        await eventually(self._stage.all_load_is_given_back)


@asynccontextmanager
async def live_streams(stage: Stage) -> AsyncIterator[Streams]:
    async with AsyncExitStack() as stack:
        streams = Streams(stage, stack)
        await streams.add()
        yield streams


async def is_everywhere(stage: Stage, store: str) -> bool:
    return {(await stage.ready(url))["store"] for url in stage.urls} == {store}


async def served(load: Load, state: str, requests: int = 30) -> None:
    """Wait until the load has had this many more answers that were placed in this state."""
    before = load.states[state]
    await eventually(lambda: load.states[state] >= before + requests)


async def redis_lost_and_back(stage: Stage, streams: Streams) -> None:
    """Kills Redis under load, opens more streams without it, and starts it again. No request may fail."""
    async with running_load(Load(stage.http, stage.urls)) as load:
        await served(load, "degraded")
        stage.redis.kill()
        await served(load, "fallback")
        await streams.add()
        stage.redis.start()
        await served(load, "degraded")
    assert load.failures == []
    await eventually(lambda: is_everywhere(stage, "up"))


async def incarnations(stage: Stage) -> dict[str, str]:
    return {name: record.incarnation for name, record in (await stage.ledger.replicas()).items()}


async def lose_redis(stage: Stage) -> None:
    stage.redis.kill()
    await eventually(lambda: is_everywhere(stage, "fallback"))


async def test_redis_hung_under_load_fails_no_request_and_the_load_is_exact_afterwards(stage: Stage) -> None:
    async with live_streams(stage) as streams:
        async with running_load(Load(stage.http, stage.urls)) as load:
            await served(load, "degraded")
            stage.redis.pause()
            await served(load, "fallback")
            await streams.add()
            await asyncio.sleep(LONGER_THAN_A_LEASE_S)
            stage.redis.resume()
            await served(load, "degraded")
        assert load.failures == []
        await eventually(lambda: is_everywhere(stage, "up"))
        await streams.are_counted_exactly()


async def test_redis_restarted_empty_under_load_learns_everything_again(stage: Stage) -> None:
    lives = await incarnations(stage)
    async with live_streams(stage) as streams:
        await redis_lost_and_back(stage, streams)
        assert await incarnations(stage) == lives
        assert len(await stage.ledger.gateways()) == len(stage.urls)
        await streams.are_counted_exactly()


async def test_redis_that_comes_back_as_it_was_earlier_counts_what_is_live_now(stage: Stage) -> None:
    """A lagging replica that becomes the master has such older data: it still has reservations that were given back."""
    lives = await incarnations(stage)
    async with live_streams(stage) as streams, live_streams(stage) as ended:
        await eventually(lambda: stage.active_is(4))
        with stage.redis.going_back_to_now():
            for stream in ended.open:
                await stream.hang_up()
            await eventually(lambda: stage.active_is(2))
            await streams.add()
            await redis_lost_and_back(stage, streams)
        ended.open.clear()
        assert await incarnations(stage) == lives
        await streams.are_counted_exactly()


async def test_redis_emptied_between_two_requests_is_filled_again_at_once(stage: Stage) -> None:
    """No connection breaks, so gateways notice only by the records that the store lacks."""
    async with live_streams(stage) as streams:
        await stage.ledger.forget_everything()
        answers = [await ask(stage.http, url, stage.new_prompt()) for url in stage.urls]
        assert all(is_complete(answer) for answer in answers)
        await streams.are_counted_exactly()
        assert len(await stage.ledger.replicas()) == len(stage.cluster.replicas)


async def test_while_redis_is_away_every_gateway_says_so_and_stays_ready(stage: Stage) -> None:
    await lose_redis(stage)
    for url in stage.urls:
        ready = await stage.ready(url)
        assert (ready["status"], ready["ready"], ready["store"]) == (200, True, "fallback")
        assert ready["store_problem"]
        assert await stage.metric(url, "kvgate_store_up") == 0
        answer = await ask(stage.http, url, stage.new_prompt())
        assert answer.headers["x-kvgate-decision"] == "fallback; policy=prefix_kv_aware; state=fallback; room=local"
        assert await stage.metric(url, "kvgate_decisions_total", state="fallback") > 0
    stage.redis.start()
    await eventually(lambda: is_everywhere(stage, "up"))
    for url in stage.urls:
        assert await stage.metric(url, "kvgate_store_up") == 1


async def test_without_redis_all_gateways_choose_the_same_replica_for_the_same_prompt(stage: Stage) -> None:
    await lose_redis(stage)
    chosen: set[str] = set()
    for _ in range(36):  # one of three replicas is missing once in 700 000 runs
        text = stage.new_prompt()
        texts = [text, f"{text} And then?"]
        answers = await asyncio.gather(*(ask(stage.http, url, text) for url in stage.urls for text in texts))
        replicas = {answer.headers["x-kvgate-replica"] for answer in answers}
        assert len(replicas) == 1, "a conversation stays where it is, whichever gateway it comes through"
        chosen |= replicas
    assert chosen == {replica.id for replica in stage.cluster.replicas}, "and conversations are spread"


async def test_a_hung_redis_delays_a_placement_by_no_more_than_its_budget(stage: Stage) -> None:
    url = stage.urls[0]
    spent_s = await stage.metric(url, "kvgate_placement_seconds_sum")
    stage.redis.pause()
    for _ in range(3 * BREAKER_MISSES):
        answer = await ask(stage.http, url, stage.new_prompt())
        assert answer.headers["x-kvgate-decision"].endswith("state=fallback; room=local")
    spent_s = await stage.metric(url, "kvgate_placement_seconds_sum") - spent_s
    assert spent_s < 2 * BREAKER_MISSES * BUDGET_S, "the first few wait for their budget, later ones not at all"
    assert (await stage.ready(url))["store"] == "fallback"


async def test_one_late_placement_falls_back_alone_and_is_counted_once(stage: Stage) -> None:
    url = stage.urls[0]
    connections = await stage.metric(url, "kvgate_store_connections_total")
    late = await stage.metric(url, "kvgate_store_late_total", cause="redis")
    stage.redis.pause()
    async with held_stream(stage.http, url, stage.new_prompt()) as stream:
        stage.redis.resume()
        assert stream.decision.endswith("state=fallback; room=local")
        answer = await ask(stage.http, url, stage.new_prompt())
        assert answer.headers["x-kvgate-decision"].endswith("state=degraded")
        assert await stage.metric(url, "kvgate_store_connections_total") == connections
        assert await stage.metric(url, "kvgate_store_late_total", cause="redis") == late + 1
        await eventually(lambda: stage.active_is(1))
        assert (await stage.ledger.sums()).active[stream.replica] == 1


async def test_without_redis_every_gateway_finds_a_dead_replica_by_itself(stage: Stage) -> None:
    await lose_redis(stage)
    async with running_load(Load(stage.http, stage.urls)) as load:
        stage.cluster.replicas[0].kill()
        await eventually(lambda: everyone_is_left_with(stage, ["r1", "r2"]))
        stage.cluster.replicas[0].start()
        await eventually(lambda: everyone_is_left_with(stage, ["r0", "r1", "r2"]))
        stage.redis.start()
        await served(load, "degraded")
    assert load.failures == []


async def everyone_is_left_with(stage: Stage, replicas: list[str]) -> bool:
    return all(ready == replicas for ready in await stage.ready_replicas())


async def test_a_gateway_started_without_redis_serves_and_joins_when_it_comes(stage: Stage) -> None:
    stage.redis.kill()
    async with another_gateway(stage.cluster, "early") as early:
        ready = await stage.ready(early.url)
        assert (ready["store"], sorted(ready["replicas"])) == ("fallback", ["r0", "r1", "r2"])
        answer = await ask(stage.http, early.url, stage.new_prompt())
        assert is_complete(answer)
        assert answer.headers["x-kvgate-decision"].endswith("state=fallback; room=local")
        async with held_stream(stage.http, early.url, stage.new_prompt()):
            stage.redis.start()
            await eventually(lambda: has_joined(stage, early))
            assert await stage.ledger.in_flight("early") == 1
            answer = await ask(stage.http, early.url, stage.new_prompt())
            assert answer.headers["x-kvgate-decision"].endswith("state=degraded")


async def has_joined(stage: Stage, gateway: GatewayProcess) -> bool:
    return (await stage.ready(gateway.url))["store"] == "up"


async def test_a_gateway_with_neither_redis_nor_a_replica_says_what_is_missing(stage: Stage) -> None:
    config = configured_like(stage.cluster, "alone", redis={"url": "redis://127.0.0.1:1"}, replicas=[])
    async with started_gateway(stage.cluster.state_dir, config) as alone:
        await eventually(lambda: stage.listens(alone.url))
        ready = await stage.ready(alone.url)
        assert (ready["status"], ready["store"]) == (503, "fallback")
        assert ready["reasons"]
        answer = await ask(stage.http, alone.url, "hello")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
