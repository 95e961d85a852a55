"""The decisions that are kept, while Redis is short of memory, emptied or away: they give way, and no request fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from bench.cluster import Cluster, running_cluster
from coordinator.decision_ring import CALL_BYTES, LEAST_BYTES, SLOTS
from coordinator.keys import decision_ring_key, decision_slot_key
from tests.api.stage import PATIENT_REDIS, chat_body, fresh
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis

CONFIG: dict[str, Any] = {"redis": PATIENT_REDIS, "decisions": {"max_bytes": LEAST_BYTES}}
KEYS = [decision_ring_key(), *(decision_slot_key("", slot) for slot in range(SLOTS))]
CHAT = "/v1/chat/completions"
_SUM_OF_BYTES = """
local sum = 0
for i = 1, #KEYS do
  sum = sum + (redis.call('MEMORY', 'USAGE', KEYS[i], 'SAMPLES', 0) or 0)
end
return sum
"""


@dataclass
class Stage:
    """Two gateways that keep 1 MiB of decisions in a Redis of their own."""

    cluster: Cluster
    server: RedisServer
    store: redis.Redis

    def kept_bytes(self) -> int:
        """Of all keys at one moment."""
        return int(self.store.eval(_SUM_OF_BYTES, len(KEYS), *KEYS))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with (
        running_redis() as server,
        running_cluster(
            gateways=2, replicas=2, replica_arguments=("--speed", "0"), config=CONFIG, redis_url=server.url
        ) as cluster,
        redis.Redis.from_url(server.url) as store,
    ):
        yield Stage(cluster, server, store)


@pytest.fixture
async def http() -> Any:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


async def sent(stage: Stage, http: httpx.AsyncClient, gateway: int = 0) -> str:
    """The id of a request that was answered well."""
    request_id = fresh("kept")
    body = chat_body(request_id, max_tokens=1)
    url = stage.cluster.gateway_urls[gateway] + CHAT
    (await http.post(url, json=body, headers={"x-request-id": request_id})).raise_for_status()
    return request_id


async def is_told(stage: Stage, http: httpx.AsyncClient, request_id: str, gateway: int = 1) -> bool:
    answer = await http.get(f"{stage.cluster.gateway_urls[gateway]}/v1/decisions/{request_id}")
    return answer.status_code == 200


async def comes_to_be_told(stage: Stage, http: httpx.AsyncClient, gateway: int = 0) -> bool:
    """Whether a new request to this gateway can be looked back at."""
    request_id = await sent(stage, http, gateway)
    await asyncio.sleep(1.2)  # gateways send once a second
    return await is_told(stage, http, request_id)


async def lost(stage: Stage, http: httpx.AsyncClient, why: str) -> float:
    """What gateways have counted as not kept."""
    pages = [(await http.get(f"{url}/metrics")).text for url in stage.cluster.gateway_urls]
    name = f'kvgate_decisions_not_kept_total{{why="{why}"}} '
    return sum(float(line.removeprefix(name)) for page in pages for line in page.splitlines() if line.startswith(name))


async def test_under_load_two_gateways_keep_no_more_than_allowed_and_the_last(
    stage: Stage, http: httpx.AsyncClient
) -> None:
    most, serial = 0, iter(range(9000))

    async def client(url: str) -> None:
        """Unreadable bodies are cheap, and have records, too. So are requests that no library builds."""
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        for number in serial:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-request-id: load-{number}\r\ncontent-length: 1\r\n\r\n"
            writer.write(head.encode() + b"{")
            answer = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(answer.partition(b"content-length: ")[2].partition(b"\r")[0]))
        writer.close()

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, await asyncio.to_thread(stage.kept_bytes))
            await asyncio.sleep(0.02)

    looking = asyncio.get_running_loop().create_task(look())
    async with asyncio.TaskGroup() as clients:
        for url in stage.cluster.gateway_urls * 8:
            clients.create_task(client(url))
    for gateway in (0, 1):  # what a gateway sends may be lost if Redis is late
        await eventually(partial(comes_to_be_told, stage, http, gateway))
    looking.cancel()
    most = max(most, stage.kept_bytes())
    # Each gateway may have written a call that is not counted yet.
    assert LEAST_BYTES / 2 < most <= LEAST_BYTES + 2 * CALL_BYTES
    assert not await is_told(stage, http, "load-0")


async def test_a_redis_that_was_emptied_is_filled_anew(stage: Stage, http: httpx.AsyncClient) -> None:
    before = await sent(stage, http)
    await eventually(lambda: is_told(stage, http, before))
    stage.store.flushall()
    await eventually(lambda: comes_to_be_told(stage, http))
    assert not await is_told(stage, http, before)


async def test_when_memory_is_short_decisions_go_first_and_requests_go_on(
    stage: Stage, http: httpx.AsyncClient
) -> None:
    await eventually(lambda: comes_to_be_told(stage, http))
    stage.store.config_set("maxmemory", 2**20)
    try:
        await eventually(lambda: is_given_back(stage, http))
        assert await lost(stage, http, "store_full") > 0
        await sent(stage, http)
    finally:
        stage.store.config_set("maxmemory", 0)
    await eventually(lambda: comes_to_be_told(stage, http))


async def is_given_back(stage: Stage, http: httpx.AsyncClient) -> bool:
    await sent(stage, http)
    return stage.kept_bytes() == 0


async def test_while_redis_is_away_requests_go_on_and_their_decisions_are_counted_as_lost(
    stage: Stage, http: httpx.AsyncClient
) -> None:
    before = await lost(stage, http, "store_away")
    stage.server.kill()
    for gateway in (0, 1):
        await sent(stage, http, gateway)
    await eventually(lambda: lost_more_than(stage, http, before))
    answer = await http.get(f"{stage.cluster.gateway_urls[0]}/v1/decisions/any")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unreachable")
    stage.server.start()
    await eventually(lambda: comes_to_be_told(stage, http))


async def lost_more_than(stage: Stage, http: httpx.AsyncClient, before: float) -> bool:
    return await lost(stage, http, "store_away") >= before + 2
