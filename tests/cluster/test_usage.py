"""Four gateways keep one ledger of usage: its sums are exactly what clients were told, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, running_cluster
from gateway.tasks import Tasks
from tests.api.stage import api_key, bearer
from tests.cluster.clients import CHAT, PAUSE_S, chat, last_event, prose
from tests.cluster.gateways import another_gateway
from tests.polling import eventually
from tests.redis_server import RedisServer

KEYS = {"alice": "research", "bob": "sales", "root": "operations"}
UNCACHED, CACHED, OUTPUT = 1_000, 100, 4_000
"""Nanos for a token."""
CONFIG = {
    "redis": {"budget_ms": 500},
    "billing": {
        "prices": [
            {
                "model": "sim",
                "uncached_input_per_mtok": UNCACHED / 1000,
                "cached_input_per_mtok": CACHED / 1000,
                "output_per_mtok": OUTPUT / 1000,
            }
        ]
    },
    "security": {
        "api_keys": [api_key(name, tenant, admin=name == "root") for name, tenant in KEYS.items()],
        "cache_salt_secret": "0123456789abcdef",
    },
}
_COUNTS = ("requests", "errors", "uncached_tokens", "cached_tokens", "output_tokens")


class Clients:
    """Alice and Bob, and the sums of what they were told."""

    def __init__(self, http: httpx.AsyncClient, cluster: Cluster) -> None:
        self.http, self.cluster = http, cluster
        self.told: dict[str, Counter[str]] = {"research": Counter(), "sales": Counter()}
        self._asked = 0

    async def ask(self, name: str, url: str, max_tokens: int = 3) -> None:
        """One request, whose prompt has a prefix of an earlier one; each second one is streamed."""
        self._asked += 1
        text = f"{prose(name + str(self._asked % 3))} {self._asked}"
        fields = {"stream": True, "stream_options": {"include_usage": True}} if self._asked % 2 else {}
        answer = await self.http.post(
            url + CHAT, json=chat(text, max_tokens=max_tokens, **fields), headers=bearer(name)
        )
        assert answer.status_code == 200, answer.text
        if fields:
            events = answer.text.removesuffix("data: [DONE]\n\n")
            usage = last_event(events)["usage"]
        else:
            usage = answer.json()["usage"]
        self.note(name, usage)

    def note(self, name: str, usage: dict[str, Any]) -> None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        uncached = usage["prompt_tokens"] - cached
        self.told[KEYS[name]] += Counter(
            requests=1, uncached_tokens=uncached, cached_tokens=cached, output_tokens=usage["completion_tokens"]
        )

    async def ask_all(self, urls: Sequence[str] = (), times: int = 2) -> None:
        """At each gateway, for both tenants."""
        for _ in range(times):
            await asyncio.gather(
                *(self.ask(name, url) for url in urls or self.cluster.gateway_urls for name in ("alice", "bob"))
            )

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Inside the context, requests go on at all gateways."""
        tasks, is_over = Tasks(), asyncio.Event()

        async def go_on(name: str, url: str) -> None:
            while not is_over.is_set():
                await self.ask(name, url)
                await asyncio.sleep(PAUSE_S)

        running = [tasks.spawn(go_on(name, url), url) for url in self.cluster.gateway_urls for name in ("alice", "bob")]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*running)

    async def serves(self, url: str, count: int) -> bool:
        """Whether a gateway has this many requests."""
        return f"kvgate_requests_in_flight {count}.0" in (await self.http.get(f"{url}/metrics")).text

    async def bill(self, name: str = "root", at: int = 0, **query: str) -> dict[str, Any]:
        url = f"{self.cluster.gateway_urls[at]}/v1/usage"
        answer = await self.http.get(url, params={"group": "tenant", **query}, headers=bearer(name))
        if answer.status_code == 503:  # the store is away
            return {"rows": []}
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def billed(self) -> dict[str, dict[str, int]]:
        return {
            row["tenant"]: {name: row[name] for name in _COUNTS if row[name]} for row in (await self.bill())["rows"]
        }

    async def is_exact(self) -> None:
        """Whether the ledger has what clients were told, within some seconds, and still has it afterwards."""
        told = {tenant: dict(counts) for tenant, counts in self.told.items()}

        async def is_told() -> bool:
            return await self.billed() == told

        try:
            await eventually(is_told, within_s=5)
        except AssertionError:
            assert await self.billed() == told
        await asyncio.sleep(1.2)  # each gateway has sent once more
        assert await self.billed() == told


@pytest.fixture(scope="module")
def cluster(server: RedisServer) -> Iterator[Cluster]:
    arguments = ("--speed", "5", "--decode-s-per-token", "0.01")
    with running_cluster(
        gateways=4, replicas=2, replica_arguments=arguments, config=CONFIG, redis_url=server.url
    ) as cluster:
        yield cluster


@pytest.fixture
async def clients(cluster: Cluster) -> AsyncIterator[Clients]:
    """What was told in earlier tests is in their sums."""
    async with httpx.AsyncClient(timeout=30) as http:
        clients = Clients(http, cluster)
        clients.told |= {tenant: Counter(counts) for tenant, counts in (await clients.billed()).items()}
        yield clients


async def test_the_bill_of_each_tenant_is_what_its_clients_were_told_and_no_other_tenant_sees_it(
    clients: Clients,
) -> None:
    await clients.ask_all()
    await clients.is_exact()
    bill = await clients.bill(at=3)
    for row in bill["rows"]:
        told = clients.told[row["tenant"]]
        assert told["cached_tokens"] > 0
        nanos = told["uncached_tokens"] * UNCACHED + told["cached_tokens"] * CACHED + told["output_tokens"] * OUTPUT
        assert round(row["cost"] * 1e9) == nanos
        assert round(row["saved"] * 1e9) == told["cached_tokens"] * (UNCACHED - CACHED)
    assert bill["totals"]["requests"] == sum(told["requests"] for told in clients.told.values())
    for name, tenant in (("alice", "research"), ("bob", "sales")):
        seen = await clients.bill(name, at=1, by="hour", group="tenant,key,model")
        assert {(row["tenant"], row["key"], row["model"]) for row in seen["rows"]} == {(tenant, name, "sim")}
        other = await clients.http.get(
            f"{clients.cluster.gateway_urls[0]}/v1/usage", params={"tenant": KEYS["root"]}, headers=bearer(name)
        )
        assert (other.status_code, other.json()["error"]["code"]) == (403, "admin_key_required")


async def test_an_emptied_redis_gets_all_of_it_back(clients: Clients, server: RedisServer) -> None:
    await clients.ask_all()
    await clients.is_exact()
    async with redis.Redis.from_url(server.url, protocol=2) as store:
        await store.flushall()
    await clients.ask_all([clients.cluster.gateway_urls[0]])
    await clients.is_exact()


async def test_a_redis_that_restarts_empty_while_requests_run_gets_all_of_it_back(
    clients: Clients, server: RedisServer
) -> None:
    async with clients.asking():
        await asyncio.sleep(1.5)
        await asyncio.to_thread(server.restart_empty)
        await asyncio.sleep(1.5)
    await clients.is_exact()


async def test_a_redis_that_is_away_for_seconds_counts_all_of_it_when_it_is_back(
    clients: Clients, server: RedisServer
) -> None:
    async with clients.asking():
        await asyncio.sleep(0.5)
        server.pause()
        try:
            await asyncio.sleep(3)
        finally:
            server.resume()
    await clients.is_exact()


async def test_a_gateway_that_stops_tells_what_it_has_counted_and_one_that_is_killed_has_told_it(
    clients: Clients,
) -> None:
    async with another_gateway(clients.cluster, "gw8") as killed, another_gateway(clients.cluster, "gw9") as stopped:
        await clients.ask_all([killed.url, stopped.url])
        await clients.is_exact()
        killed.signal(signal.SIGKILL)
        running = [asyncio.ensure_future(clients.ask(name, stopped.url, 500)) for name in ("alice", "bob") * 3]
        await eventually(lambda: clients.serves(stopped.url, len(running)))
        stopped.signal(signal.SIGTERM)
        await asyncio.gather(*running)
        await eventually(stopped.has_exited)
        await clients.is_exact()
