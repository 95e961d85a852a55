"""A stream whose first byte is late gets a second attempt elsewhere, as far as the cluster's allowance goes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, SimReplica, running_cluster
from coordinator.keys import PoolKeys
from gateway.ops.cli.explain import reasons
from tests.chaos.stage import BUDGET_S, Stage
from tests.chaos.test_dead_hosts import PATIENT, are
from tests.chaos.test_long_prompts import BUSY_S, times_busy
from tests.chaos.test_sleeping_replicas import READY
from tests.cluster.clients import CHAT, ask, records_of
from tests.cluster.gateways import another_gateway
from tests.cluster.ledger import Ledger
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

# A prompt of about 600 tokens takes 60 ms, and two seconds on a slow replica.
REPLICA_ARGUMENTS = ("--prefill-tokens-per-s", "10000", "--decode-s-per-token", "0.04")
PROMPT_TOKENS = 620
"""At most."""
SLOWER = 40
SHARE = 0.3
CONFIG: dict[str, Any] = {
    "redis": {"budget_ms": BUDGET_S * 1000},
    "hedge": {"late_factor": 4, "max_share": SHARE},
}


class HedgeStage(Stage):
    """A cluster whose requests are late when their replica is slow."""

    client: redis.Redis

    def __init__(self, cluster: Cluster, redis: RedisServer) -> None:
        super().__init__(cluster, redis)
        self.keys = PoolKeys(cluster.pool)

    async def allowance(self) -> tuple[float, float]:
        """The tokens that were placed, and those that were computed twice; both fade."""
        placed, hedged = await self.client.hmget(self.keys.hedges, "placed", "hedged")
        return float(placed or 0), float(hedged or 0)

    async def streams(self, text: str, gateway: int = 0, **fields: Any) -> httpx.Response:
        body = {"model": "sim", "max_tokens": 1, "stream": True, "messages": [{"role": "user", "content": text}]}
        answer = await self.http.post(self.urls[gateway] + CHAT, json={**body, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        return answer

    async def earns(self) -> None:
        """Replicas compute prompts, one after the other, until Redis has heard of enough for two second attempts."""
        while (await self.allowance())[0] * SHARE < 2.5 * PROMPT_TOKENS:
            await self.streams(self.new_prompt())

    async def slow_owner(self) -> tuple[str, SimReplica]:
        """A prompt, and the replica that has it and is slow from now on."""
        text = self.new_prompt()
        answer = await self.streams(text)
        owner = self.replica(answer.headers["x-kvgate-replica"])
        await self.fail(owner, "slower", times=SLOWER)
        return text, owner

    async def asked(self) -> dict[str, int]:
        """How many requests each replica has got."""
        return {each.id: (await self.replica_state(each))["requests"] for each in self.cluster.replicas}

    async def computing(self) -> list[SimReplica]:
        """The replicas that compute a request."""
        states = {replica.id: await self.replica_state(replica) for replica in self.cluster.replicas}
        return [each for each in self.cluster.replicas if states[each.id]["running"] + states[each.id]["waiting"]]

    async def records(self, answer: httpx.Response) -> Any:
        """What is kept of a request."""
        return await records_of(self.http, self.urls[0], answer.headers["x-request-id"])

    async def has_failed_once(self, replica: str) -> bool:
        """Whether its breaker has counted one failure."""
        return (await self.ledger.breakers()).get(replica, "").startswith("1 ")

    async def outcomes(self, outcome: str) -> float:
        return await self.metric_of_all("kvgate_hedges_total", outcome=outcome)


@pytest.fixture(scope="module")
def hedge_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def hedge_cluster(hedge_redis: RedisServer) -> Iterator[HedgeStage]:
    with running_cluster(
        gateways=2,
        replicas=3,
        replica_arguments=REPLICA_ARGUMENTS,
        events=False,
        config=CONFIG,
        redis_url=hedge_redis.url,
    ) as cluster:
        yield HedgeStage(cluster, hedge_redis)


@pytest.fixture
async def stage(hedge_cluster: HedgeStage) -> AsyncIterator[HedgeStage]:
    stage = hedge_cluster
    async with (
        httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_keepalive_connections=None)) as http,
        redis.Redis.from_url(stage.redis.url, decode_responses=True, protocol=2) as client,
    ):
        stage.http, stage.client, stage.ledger = http, client, Ledger(client, stage.cluster.pool)
        for replica in stage.cluster.replicas:  # engines tell their speed since their start: no slow test before counts
            replica.kill()
            replica.start()
        await stage.healed()
        await client.delete(stage.keys.hedges, stage.keys.late)
        yield stage
        await asyncio.gather(*(stage.clear_faults(replica) for replica in stage.cluster.replicas))
        await eventually(stage.all_load_is_given_back)


async def test_a_late_stream_is_answered_by_another_replica(stage: HedgeStage) -> None:
    await stage.earns()
    text, owner = await stage.slow_owner()
    aborted, won = (await stage.replica_state(owner))["aborted"], await stage.outcomes("won")
    answer = await stage.streams(text, gateway=1)
    second = answer.headers["x-kvgate-replica"]
    assert second != owner.id
    assert f"hedged={owner.id}" in answer.headers["x-kvgate-decision"]
    assert await stage.outcomes("won") == won + 1

    async def is_aborted() -> bool:
        return bool((await stage.replica_state(owner))["aborted"] == aborted + 1)

    await eventually(is_aborted)
    [record] = await stage.records(answer)
    assert (record["hedged"], record["replica"]) == (owner.id, second)
    assert any(line.startswith(f"{owner.id} was late") for line in reasons(record))


@pytest.mark.parametrize("mode", ["cut", "error"])
async def test_a_second_attempt_answers_if_the_first_one_fails(stage: HedgeStage, mode: str) -> None:
    await stage.earns()
    text, owner = await stage.slow_owner()
    others = [replica for replica in stage.cluster.replicas if replica is not owner]
    await asyncio.gather(*(stage.fail(replica, "slower", times=2 * SLOWER) for replica in others))
    await stage.fail(owner, mode, after_tokens=0)  # when the first token is due
    before, won = await stage.asked(), await stage.outcomes("won")
    answer = await stage.streams(text, gateway=1)
    asked, second = await stage.asked(), answer.headers["x-kvgate-replica"]
    assert second != owner.id
    assert {name: asked[name] - before[name] for name in asked if asked[name] != before[name]} == {
        owner.id: 1,
        second: 1,
    }
    assert await stage.outcomes("won") == won + 1
    [record] = await stage.records(answer)
    assert [each["replica"] for each in record["failed"]] == [owner.id]


async def asks_two(stage: HedgeStage, asking: asyncio.Task[httpx.Response]) -> bool:
    """Whether two replicas compute the prompt now, or it is answered."""
    return asking.done() or await both_compute(stage)


async def test_a_third_replica_answers_if_both_attempts_die(stage: HedgeStage) -> None:
    asking, has_second = None, False
    while not has_second:  # on a busy machine, there may be none
        for replica in stage.cluster.replicas:
            await stage.fail(replica, "none")
        await stage.earns()
        for replica in stage.cluster.replicas:
            await stage.fail(replica, "slower", times=SLOWER)
        asking = asyncio.get_running_loop().create_task(stage.streams(stage.new_prompt()))
        await eventually(lambda asked=asking: asks_two(stage, asked))
        has_second = not asking.done()
    assert asking is not None
    dead = await stage.computing()
    for replica in dead:
        replica.signal(signal.SIGKILL)
    answer = await asking
    assert answer.headers["x-kvgate-replica"] not in [replica.id for replica in dead]
    [record] = await stage.records(answer)
    assert sorted(each["replica"] for each in record["failed"]) == sorted(replica.id for replica in dead)


async def test_a_second_attempt_that_fails_counts_for_its_replicas_breaker(stage: HedgeStage) -> None:
    await stage.earns()
    text, owner = await stage.slow_owner()
    others = [replica for replica in stage.cluster.replicas if replica is not owner]
    await asyncio.gather(*(stage.fail(replica, "reset", count=-1) for replica in others))
    answer = await stage.streams(text, gateway=1)
    assert answer.headers["x-kvgate-replica"] == owner.id
    [record] = await stage.records(answer)
    [failed] = record["failed"]
    assert (failed["why"], record["late"]) == ("reset", "failed")
    await eventually(lambda: stage.has_failed_once(failed["replica"]))


async def test_a_late_prompt_is_expected_only_where_it_was_computed(stage: HedgeStage) -> None:
    await stage.earns()
    everybody = {replica.id for replica in stage.cluster.replicas}
    for replica in stage.cluster.replicas[:2]:
        await stage.fail(replica, "slower", times=SLOWER)
    text = stage.new_prompt()
    answer = await stage.streams(text)
    second, first = answer.headers["x-kvgate-replica"], answer.headers["x-kvgate-decision"].partition("hedged=")[2]
    if first:  # it was placed at a slow one
        held = {name: told["matched_tokens"] for name, told in (await stage.explained(text)).items()}
        assert held[second] > 0
        assert [held[name] for name in everybody - {second}] == [0, 0]


async def test_a_client_that_leaves_takes_both_attempts_with_it(stage: HedgeStage) -> None:
    await stage.earns()
    for replica in stage.cluster.replicas:
        await stage.fail(replica, "slower", times=SLOWER)
    body = {"model": "sim", "stream": True, "messages": [{"role": "user", "content": stage.new_prompt()}]}
    asking = asyncio.get_running_loop().create_task(stage.http.post(stage.urls[0] + CHAT, json=body))

    await eventually(lambda: both_compute(stage))
    asking.cancel()

    async def nobody_computes() -> bool:
        return not await stage.computing()

    await eventually(nobody_computes)


async def both_compute(stage: HedgeStage) -> bool:
    return len(await stage.computing()) == 2


async def test_all_gateways_hedge_no_more_than_their_share(stage: HedgeStage) -> None:
    before, withheld = await stage.metric_of_all("kvgate_hedged_tokens_total"), await stage.outcomes("withheld")
    await stage.earns()
    _, of_others = await stage.allowance()  # what is left of other tests
    for replica in stage.cluster.replicas:
        await stage.fail(replica, "slower", times=SLOWER / 2)
    for _ in range(5):  # on a busy machine, few may be late
        await asyncio.gather(*(stage.streams(stage.new_prompt(), number % 2) for number in range(9)))
        hedged = await stage.metric_of_all("kvgate_hedged_tokens_total") - before
        placed, faded = await stage.allowance()
        assert 0 < faded <= hedged + of_others
        assert faded <= SHARE * placed
        if await stage.outcomes("withheld") > withheld:
            return
    pytest.fail("no second attempt was withheld")


async def test_a_prompt_that_keeps_servers_busy_gets_no_second_attempt(stage: HedgeStage) -> None:
    """Else it would take a replica more than without second attempts: see test_long_prompts.py."""
    await stage.earns()
    before = await times_busy(stage)
    async with another_gateway(stage.cluster, "patient", hedge=CONFIG["hedge"], **PATIENT) as gateway:
        await stage.fail_everywhere("block", seconds=BUSY_S, over_bytes=len(text := stage.new_prompt()), count=-1)
        refused = await ask(stage.http, gateway.url, text, stream=True)
    assert refused.json()["error"]["code"] == "prompt_stalls_replicas"
    assert await times_busy(stage) - before == 2
    await eventually(lambda: are(stage, READY))
