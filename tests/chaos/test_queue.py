"""Requests wait in one queue for all gateways while no replica has room, and no fault loses one of them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from bench.cluster import running_cluster
from tests.chaos.stage import CONFIG, REPLICA_ARGUMENTS
from tests.chaos.tenant_stage import EACH, LOOKS_EVERY_S, SLOTS, TenantStage, api_keys
from tests.cluster.clients import ask
from tests.cluster.gateways import another_gateway
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

WAITING = 20
TENANTS = ("greedy", "modest", "urgent")
QUEUE_CONFIG: dict[str, Any] = CONFIG | {
    "policy": {"max_active_requests": EACH},
    "queue": {"wait_s": 30, "max_waiting": WAITING},
    "tenants": [{"name": "urgent", "priority": "realtime"}],
    "security": {"share_cache": True, "api_keys": api_keys(TENANTS, admins=TENANTS)},
}


class QueueStage(TenantStage):
    """A cluster whose replicas take two requests each."""

    async def waits_here(self, count: int) -> None:
        """Waits until gateways have this many queued requests; without the store it does not count them."""

        async def are_waiting() -> bool:
            return await self.metric_of_all("kvgate_queue_waiting_requests") == count

        await eventually(are_waiting)

    async def most_running(self) -> int:
        """The most requests that a replica has now."""
        engines = await asyncio.gather(*(self.replica_state(replica) for replica in self.cluster.replicas))
        return max(one["running"] for one in engines)

    @asynccontextmanager
    async def without_store(self) -> AsyncIterator[None]:
        """Redis is dead, and all gateways know it. At the end it starts again."""
        self.redis.kill()
        try:
            await eventually(self.has_fallen_back)
            yield
        finally:
            self.redis.start()

    async def healed_through(self) -> bool:
        """Whether all gateways place through the store, which knows all streams."""
        is_up = all([(await self.ready(url))["store"] == "up" for url in self.urls])
        return is_up and sum(map(int, (await self.client.hgetall(self.keys.active)).values())) == SLOTS

    async def seat_names(self) -> list[str]:
        """The seats of all gateways."""
        gateways = await self.client.hkeys(self.keys.gateways)
        return [name for gateway in gateways for name in await self.client.hkeys(self.keys.seats(gateway))]


@pytest.fixture(scope="module")
def queue_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def queue_cluster(queue_redis: RedisServer) -> Iterator[QueueStage]:
    with running_cluster(
        replica_arguments=REPLICA_ARGUMENTS, events=False, config=QUEUE_CONFIG, redis_url=queue_redis.url
    ) as cluster:
        yield QueueStage(cluster, queue_redis)


@pytest.fixture
async def stage(queue_cluster: QueueStage) -> AsyncIterator[QueueStage]:
    async with queue_cluster.opened(TENANTS):
        yield queue_cluster


async def test_no_replica_ever_has_more_than_its_slots_and_every_request_is_answered(stage: QueueStage) -> None:
    tasks = [stage.ask("greedy", number % 2, max_tokens=10) for number in range(SLOTS + WAITING)]
    most = 0
    while not all(task.done() for task in tasks):
        active = await stage.client.hgetall(stage.keys.active)
        assert all(int(count) <= EACH for count in active.values())
        engines = await asyncio.gather(*(stage.replica_state(replica) for replica in stage.cluster.replicas))
        assert all(one["running"] <= EACH for one in engines)
        most = max(most, sum(map(int, active.values())))
        await asyncio.sleep(LOOKS_EVERY_S)
    answers = [await task for task in tasks]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert sum("waited_ms=" in answer.headers["x-kvgate-decision"] for answer in answers) >= WAITING // 2
    assert most == SLOTS
    assert await stage.metric_of_all("kvgate_queue_wait_seconds_count", band="normal") >= WAITING // 2


async def test_a_tenant_with_few_requests_does_not_wait_for_one_with_many(stage: QueueStage) -> None:
    order: list[str] = []
    async with stage.full() as streams:
        tasks = []
        for count, (tenant, gateway) in enumerate([("greedy", 0)] * 8 + [("modest", 1)] * 2 + [("urgent", 1)], 1):
            task = stage.ask(tenant, gateway)
            task.add_done_callback(lambda _, tenant=tenant: order.append(tenant))
            tasks.append(task)
            await stage.waits(count)
        assert await stage.metric_of_all("kvgate_queue_waiting_requests") == 11
        await streams.pop_all().aclose()
        answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 11
    assert order.index("urgent") < SLOTS
    last = {tenant: at for at, tenant in enumerate(order)}
    assert last["modest"] < last["greedy"] - 1, f"in the order in which they came, it would be served last: {order}"


async def test_explain_says_that_a_request_would_wait(stage: QueueStage) -> None:
    assert (await stage.explain(stage.new_prompt()))["choice"]["must_wait"] is False
    async with stage.full():
        assert (await stage.explain(stage.new_prompt()))["choice"]["must_wait"] is True
        assert await stage.waiting() == 0


async def test_a_full_queue_and_a_wait_that_is_too_long_are_refused_with_codes(stage: QueueStage) -> None:
    before = await stage.metric_of_all("kvgate_queue_refusals_total", reason="full")
    async with stage.full():
        waiting = [stage.ask("greedy", number % 2) for number in range(WAITING)]
        await stage.waits(WAITING)
        refused = await stage.ask("modest", 1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert await stage.metric_of_all("kvgate_queue_refusals_total", reason="full") == before + 1
        for task in waiting:
            task.cancel()
        await stage.waits(0)
        queue = QUEUE_CONFIG["queue"] | {"wait_s": 0.2}
        async with another_gateway(stage.cluster, "hasty", queue=queue) as hasty:
            await eventually(lambda: has_store(stage, hasty.url))
            late = await ask(stage.tenants["modest"], hasty.url, stage.new_prompt())
    assert (late.status_code, late.json()["error"]["code"]) == (503, "deadline_unreachable")


async def has_store(stage: QueueStage, url: str) -> bool:
    """Without it, a gateway would find room by itself."""
    return bool((await stage.ready(url))["store"] == "up")


async def test_the_seats_of_a_killed_gateway_go_and_others_get_the_room(stage: QueueStage) -> None:
    async with stage.full() as streams:
        async with another_gateway(stage.cluster, "doomed") as doomed:
            lost = asyncio.get_running_loop().create_task(ask(stage.tenants["greedy"], doomed.url, stage.new_prompt()))
            await stage.waits(1)
            doomed.signal(signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await lost
        await stage.waits(0)
        assert await stage.client.exists(stage.keys.seats("doomed")) == 0
        kept = stage.ask("greedy", 1)
        await stage.waits(1)
        await streams.pop_all().aclose()
        assert (await kept).status_code == 200


async def test_a_replica_that_dies_does_not_lose_those_that_wait(stage: QueueStage) -> None:
    async with stage.full():
        waiting = [stage.ask("modest", number % 2) for number in range(4)]
        await stage.waits(4)
        stage.cluster.replicas[0].signal(signal.SIGKILL)
    answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in answers] == [200] * 4
    await stage.healed()
    for url in stage.urls:  # a request that found a connection of the dead process would not try this replica again
        await eventually(lambda url=url: serves(stage, url, stage.cluster.replicas[0].id))


async def serves(stage: QueueStage, url: str, replica: str) -> bool:
    answer = await ask(stage.tenants["modest"], url, stage.new_prompt())
    return answer.headers["x-kvgate-replica"] == replica


@pytest.mark.parametrize("fault", ["dies", "is emptied", "hangs"])
async def test_no_waiting_request_is_lost_with_the_store(stage: QueueStage, fault: str) -> None:
    async with stage.full() as streams:
        waiting = [stage.ask("modest", number % 2) for number in range(6)]
        await stage.waits(6)
        if fault == "is emptied":
            await stage.ledger.forget_everything()
            await stage.waits(6)
        elif fault == "dies":
            stage.redis.kill()
            await asyncio.wait(waiting, timeout=5)
            stage.redis.start()
        else:
            stage.redis.pause()
            await asyncio.wait(waiting, timeout=5)
            stage.redis.resume()
        await streams.pop_all().aclose()
        answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in answers] == [200] * 6


async def test_without_the_store_no_replica_has_more_than_its_slots_and_every_request_is_answered(
    stage: QueueStage,
) -> None:
    async with stage.without_store():
        tasks = [stage.ask("greedy", number % 2, max_tokens=10) for number in range(SLOTS + 14)]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, await stage.most_running())
            assert most <= EACH
            await asyncio.sleep(LOOKS_EVERY_S)
        answers = [await task for task in tasks]
    assert most == EACH
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    decisions = [answer.headers["x-kvgate-decision"] for answer in answers]
    assert all("state=fallback; room=local" in decision for decision in decisions)
    # The first ones may end before the last ones come.
    assert sum("waited_ms=" in decision for decision in decisions) >= 14 // 2


async def test_without_the_store_bands_go_first_and_the_queue_is_bounded(stage: QueueStage) -> None:
    order: list[str] = []
    async with stage.without_store(), stage.full() as streams:
        tasks = []
        for count, tenant in enumerate(["greedy"] * 9 + ["urgent"], 1):
            task = stage.ask(tenant, 0)
            task.add_done_callback(lambda _, tenant=tenant: order.append(tenant))
            tasks.append(task)
            await stage.waits_here(count)
        refused = await stage.ask("modest", 0)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        tasks.pop(0).cancel()
        await stage.waits_here(9)
        await streams.pop_all().aclose()
        answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 9
    assert order.index("urgent") <= SLOTS // 2 + 1, "each gateway has half of the slots; one client has left"


async def test_when_the_store_is_back_those_that_wait_get_seats_in_the_order_in_which_they_came(
    stage: QueueStage,
) -> None:
    async with AsyncExitStack() as streams:
        async with stage.without_store():
            await streams.enter_async_context(stage.full())
            tasks = []
            for number in range(6):
                tasks.append(stage.ask("modest", number % 2))
                await stage.waits_here(number + 1)
        await stage.waits(6)
        [queue] = await stage.client.hkeys(stage.keys.waiting)
        line = await stage.client.zrange(f"kvgate:{{{stage.cluster.pool}}}:line:{queue} modest", 0, -1)
        came = [seat.split(" ")[0] for seat in line]
        assert came == came[:2] * 3
        assert len(set(came)) == 2, "the gateways in turn, as the requests came"
        active = await stage.client.hgetall(stage.keys.active)
        assert sorted(active.values()) == [str(EACH)] * 3, "nothing is granted before all load is stated"
        assert not any(task.done() for task in tasks)
        await streams.aclose()
        answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 6
    decisions = [answer.headers["x-kvgate-decision"] for answer in answers]
    assert all("waited_ms=" in decision and "state=fallback" not in decision for decision in decisions)


async def test_seats_outlast_a_store_that_hangs_and_room_is_taken_meanwhile(stage: QueueStage) -> None:
    async with AsyncExitStack() as streams:
        async with stage.without_store():
            await streams.enter_async_context(stage.full())
        await eventually(stage.healed_through)
        waiting = [stage.ask("modest", number % 2) for number in range(6)]
        await stage.waits(6)
        names = set(await stage.seat_names())
        stage.redis.pause()
        await eventually(stage.has_fallen_back)
        newcomer = stage.ask("greedy", 0)
        await stage.waits_here(7)
        stage.redis.resume()
        await stage.waits(7)
        assert names < set(await stage.seat_names())
        stage.redis.pause()
        await streams.aclose()
        answers = await asyncio.gather(*waiting, newcomer)
        stage.redis.resume()
    assert [answer.status_code for answer in answers] == [200] * 7
    assert all("state=fallback; room=local; waited_ms=" in answer.headers["x-kvgate-decision"] for answer in answers)
