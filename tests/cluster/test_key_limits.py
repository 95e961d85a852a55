"""An API key has limits of its own, over all gateways, beside those of its tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster, running_cluster
from tests.api.stage import PATIENT_REDIS
from tests.cluster.clients import CHAT, api_key, chat, held_stream, prose
from tests.cluster.test_keys_in_redis import (
    OPS,
    REPLICA_ARGUMENTS,
    SECRET,
    Operator,
    bearer,
    within_a_second,
)
from tests.polling import eventually
from tests.redis_server import RedisServer

IN_FILE, LEAD = "file-key-0123456789", "lead-key-0123456789"
CONFIG = {
    "redis": PATIENT_REDIS,
    "tenants": [{"name": "small", "limits": {"requests_per_min": 6}}],
    "security": {
        "api_keys": [
            api_key("ops", OPS, "operations", admin=True),
            api_key("in-file", IN_FILE, "files", limits={"requests_per_min": 3}),
            api_key("lead", LEAD, "team", manages_keys=True, limits={"requests_per_min": 60}),
        ],
        "cache_salt_secret": "0123456789abcdef",
        "records_secret": SECRET,
        "expose_decisions": True,
    },
}


@pytest.fixture(scope="module")
def cluster(server: RedisServer) -> Iterator[Cluster]:
    with running_cluster(
        gateways=2, replicas=2, replica_arguments=REPLICA_ARGUMENTS, config=CONFIG, redis_url=server.url
    ) as cluster:
        yield cluster


class Clients:
    """The holders of keys. `ops` makes them."""

    def __init__(self, http: httpx.AsyncClient, cluster: Cluster) -> None:
        self.http, self.cluster, self.ops = http, cluster, Operator(http, cluster, OPS)

    async def key(self, name: str, **more: Any) -> str:
        """A new key that all gateways know."""
        return await self.known(await self.ops.create(name, **more))

    async def known(self, made: dict[str, Any]) -> str:
        await within_a_second(self.http, self.cluster, made, 200)
        return str(made["key"])

    async def ask(self, key: str, at: int) -> httpx.Response:
        url = self.cluster.gateway_urls[at]
        return await self.http.post(url + CHAT, json=chat("hi", 1), headers=bearer(key))

    async def statuses(self, key: str, count: int) -> list[int]:
        """What the gateways answer, in turns."""
        return [(await self.ask(key, number % 2)).status_code for number in range(count)]

    async def waiting(self) -> int:
        pools = (await self.ops.send("GET", "/v1/queue")).json()["pools"]
        return sum(one["requests"] for pool in pools for one in pool["waiting"])

    async def waits(self, count: int) -> None:
        async def are_waiting() -> bool:
            return await self.waiting() == count

        await eventually(are_waiting)


@pytest.fixture
async def clients(cluster: Cluster) -> AsyncIterator[Clients]:
    async with httpx.AsyncClient(timeout=30) as http:
        yield Clients(http, cluster)


async def test_a_keys_limit_holds_over_all_gateways_and_other_keys_of_its_tenant_do_not_share_it(
    clients: Clients,
) -> None:
    key, other = (
        await clients.key("three", tenant="a", limits={"requests_per_min": 3}),
        await clients.key("free", tenant="a"),
    )
    assert await clients.statuses(key, 4) == [200, 200, 200, 429]
    refused = await clients.ask(key, 0)
    assert refused.json()["error"]["code"] == "rate_limited"
    assert refused.json()["error"]["message"].startswith("Rate limit of your API key reached: 3 requests per minute.")
    assert (refused.headers["x-ratelimit-limit-requests"], refused.headers["x-ratelimit-remaining-requests"]) == (
        "3",
        "0",
    )
    assert await clients.statuses(other, 2) == [200, 200]
    assert await clients.statuses(IN_FILE, 4) == [200, 200, 200, 429]


async def test_a_request_is_let_in_only_if_its_tenant_and_its_key_let_it_in_and_the_least_is_shown(
    clients: Clients,
) -> None:
    first, second = [await clients.key(name, tenant="small", limits={"requests_per_min": 4}) for name in ("1", "2")]
    answers = [await clients.ask(first, number % 2) for number in range(5)]
    assert [one.status_code for one in answers] == [200] * 4 + [429]
    assert [one.headers["x-ratelimit-remaining-requests"] for one in answers] == [*"3210", "0"]
    assert "your API key" in answers[-1].json()["error"]["message"]
    answers = [await clients.ask(second, number % 2) for number in range(3)]
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert [one.headers["x-ratelimit-limit-requests"] for one in answers] == ["6"] * 3
    assert "your tenant reached: 6 requests" in answers[-1].json()["error"]["message"]


async def test_requests_above_a_keys_concurrency_are_queued_and_those_of_other_keys_are_not(clients: Clients) -> None:
    key, other = (
        await clients.key("single", tenant="b", limits={"concurrency": 1}),
        await clients.key("other", tenant="b"),
    )
    holder = httpx.AsyncClient(timeout=30, headers=bearer(key))
    async with holder, held_stream(holder, clients.cluster.gateway_urls[0], prose("held")) as stream:
        queued = [asyncio.ensure_future(clients.ask(key, at)) for at in (0, 1, 1)]
        await clients.waits(3)
        assert await clients.statuses(other, 4) == [200] * 4
        assert await clients.waiting() == 3
        await stream.hang_up()
        assert [(await one).status_code for one in queued] == [200] * 3


async def test_the_keys_of_a_rotation_share_one_account(clients: Clients) -> None:
    old = await clients.ops.create("rotated", tenant="c", limits={"requests_per_min": 4})
    key = await clients.known(old)
    assert await clients.statuses(key, 3) == [200] * 3
    for _ in range(2):
        old = (await clients.ops.send("POST", f"/v1/keys/{old['id']}/rotate", at=1)).json()
        assert old["limits"] == {"requests_per_min": 4}
    assert await clients.statuses(await clients.known(old), 2) == [200, 429]
    assert await clients.statuses(key, 1) == [429]


async def test_self_service_makes_no_key_with_higher_limits_than_its_own(clients: Clients) -> None:
    lead = Operator(clients.http, clients.cluster, LEAD)
    for limits in ({}, {"requests_per_min": 61}, {"tokens_per_min": 5}):
        refused = await lead.send("POST", "/v1/keys", name="more", limits=limits)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (
            403,
            "beyond_own_key",
            "limits.requests_per_min",
        )
        assert "60 or less" in error["message"]
    made = await lead.create("less", limits={"requests_per_min": 60, "concurrency": 2})
    assert made["limits"] == {"concurrency": 2, "requests_per_min": 60}
    unlimited = await clients.ops.create("unlimited", tenant="team")
    refused = await lead.send("POST", f"/v1/keys/{unlimited['id']}/rotate")
    assert refused.json()["error"]["param"] == "limits.requests_per_min"


async def test_without_redis_each_gateway_keeps_its_share_of_a_keys_limits(
    clients: Clients, server: RedisServer
) -> None:
    key = await clients.key("shared", tenant="d", limits={"requests_per_min": 6})
    server.kill()
    try:
        await eventually(lambda: has_fallen_back(clients))
        for at in range(2):
            assert [(await clients.ask(key, at)).status_code for _ in range(4)] == [200] * 3 + [429]
    finally:
        server.start()
    await eventually(lambda: is_back(clients))

    async def is_counted() -> bool:
        return (await clients.ask(key, 0)).status_code == 429

    await eventually(is_counted)


async def has_fallen_back(clients: Clients) -> bool:
    return all([await store_of(clients, url) == "fallback" for url in clients.cluster.gateway_urls])


async def is_back(clients: Clients) -> bool:
    return all([await store_of(clients, url) != "fallback" for url in clients.cluster.gateway_urls])


async def store_of(clients: Clients, url: str) -> str:
    return str((await clients.http.get(f"{url}/ready")).json()["store"])
