"""A tenant's limits hold over all gateways, and no fault loses what they count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, RateLimitError

from bench.cluster import running_cluster
from tests.chaos.stage import CONFIG, REPLICA_ARGUMENTS
from tests.chaos.tenant_stage import LOOKS_EVERY_S, TenantStage, api_keys
from tests.cluster.clients import ask, held_stream
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

MOST = 3
LIMITS = {
    "free": {},
    "capped": {"concurrency": MOST},
    "counted": {"requests_per_min": 6},
    "shared": {"requests_per_min": 6},
    "spare": {"requests_per_min": 6},
    "metered": {"tokens_per_min": 3000},
}
LIMITS_CONFIG: dict[str, Any] = CONFIG | {
    "queue": {"wait_s": 30},
    "tenants": [{"name": name, "limits": limits} for name, limits in LIMITS.items()],
    "security": {"share_cache": True, "api_keys": api_keys(LIMITS, admins=LIMITS)},
}


class LimitStage(TenantStage):
    """A cluster whose replicas have room, and whose tenants have limits."""

    async def active(self, tenant: str) -> int:
        return int(await self.client.hget(self.keys.tenants, f"active {tenant}") or 0)


@pytest.fixture(scope="module")
def limit_redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def limit_cluster(limit_redis: RedisServer) -> Iterator[LimitStage]:
    with running_cluster(
        replica_arguments=REPLICA_ARGUMENTS, events=False, config=LIMITS_CONFIG, redis_url=limit_redis.url
    ) as cluster:
        yield LimitStage(cluster, limit_redis)


@pytest.fixture
async def stage(limit_cluster: LimitStage) -> AsyncIterator[LimitStage]:
    async with limit_cluster.opened(LIMITS):
        await limit_cluster.client.delete(limit_cluster.keys.tenants)
        yield limit_cluster


async def test_a_tenants_requests_in_flight_are_limited_over_all_gateways(stage: LimitStage) -> None:
    tasks = [stage.ask("capped", number % 2, max_tokens=20) for number in range(12)]
    most = 0
    while not all(task.done() for task in tasks):
        running = await stage.running()
        assert running <= MOST
        most = max(most, running)
        await asyncio.sleep(LOOKS_EVERY_S)
    assert {(await task).status_code for task in tasks} == {200}
    assert most == MOST
    assert await stage.active("capped") == 0


async def test_requests_a_minute_are_counted_over_all_gateways_and_answers_say_how_many_are_left(
    stage: LimitStage,
) -> None:
    before = await stage.metric_of_all("kvgate_queue_refusals_total", reason="requests")
    answers = [await stage.ask("counted", number % 2) for number in range(7)]
    assert [answer.status_code for answer in answers] == [200] * 6 + [429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == [*"543210", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"6"}
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limited"
    assert 8 <= int(refused.headers["retry-after"]) <= 10
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")
    assert await stage.metric_of_all("kvgate_queue_refusals_total", reason="requests") == before + 1
    async with AsyncOpenAI(base_url=f"{stage.urls[0]}/v1", api_key="counted", max_retries=0) as client:
        with pytest.raises(RateLimitError) as raised:
            await client.completions.create(model="sim", prompt="x")
    assert raised.value.code == "rate_limited"


async def test_requests_that_compute_nothing_do_not_count(stage: LimitStage) -> None:
    http, body = stage.tenants["metered"], {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
    for path in ("/tokenize", "/v1/messages/count_tokens", "/v1/chat/completions/render"):
        answer = await http.post(stage.urls[0] + path, json=body)
        assert "x-ratelimit-remaining-tokens" not in answer.headers, path
    assert not await stage.client.hgetall(stage.keys.tenants)


async def test_tokens_a_minute_are_those_that_the_engine_reports(stage: LimitStage) -> None:
    prompt = stage.new_prompt()
    first = await ask(stage.tenants["metered"], stage.urls[0], prompt, max_tokens=5)
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 3000
    used = first.json()["usage"]["total_tokens"]
    again = await ask(stage.tenants["metered"], stage.urls[1], prompt, max_tokens=5)
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > used / 2
    reserved = 3000 - used - int(again.headers["x-ratelimit-remaining-tokens"])
    assert -60 < reserved - (used - cached) < 60, "cached tokens are free; some have leaked meanwhile"


async def test_a_long_answer_reserves_all_of_its_tokens_and_gives_back_those_that_were_not_made(
    stage: LimitStage,
) -> None:
    async with held_stream(stage.tenants["metered"], stage.urls[0], stage.new_prompt(), 3000) as stream:
        refused = await stage.ask("metered", 1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        await stream.hang_up()

    async def are_back() -> bool:
        return (await stage.ask("metered", 1)).status_code == 200

    await eventually(are_back)


async def test_without_the_store_each_gateway_keeps_its_share_of_the_limits(stage: LimitStage) -> None:
    stage.redis.kill()
    await eventually(stage.has_fallen_back)
    tasks = [stage.ask("capped", number % 2, max_tokens=20) for number in range(12)]
    most = 0
    while not all(task.done() for task in tasks):
        running = await stage.running()
        assert running <= 2 * (MOST // 2)
        most = max(most, running)
        await asyncio.sleep(LOOKS_EVERY_S)
    assert {(await task).status_code for task in tasks} == {200}
    assert most == 2 * (MOST // 2)
    for gateway in (0, 1):
        answers = [await stage.ask("shared", gateway) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 3 + [429]
        assert answers[-1].json()["error"]["code"] == "rate_limited"
        assert 10 <= int(answers[-1].headers["retry-after"]) <= 20
        assert (await stage.ask("free", gateway)).status_code == 200
    stage.redis.start()
