"""LMCache's chunks fill the Redis that coordination uses, while two gateways place requests. Redis evicts chunks.

It cannot evict chunks without a TTL until the watcher gives them one. Until then it refuses writes of chunks.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import redis as sync_redis
import redis.asyncio as redis
from redis.exceptions import OutOfMemoryError

from bench.cluster import running_cluster
from coordinator.watch.key_samples import kind_of
from gateway.ops.local.cluster_status import cluster_status
from tests.api.stage import PATIENT_REDIS
from tests.chaos.stage import Stage
from tests.cluster.clients import Load, ask, is_complete, running_load
from tests.cluster.ledger import Ledger
from tests.polling import eventually
from tests.redis_server import running_redis

pytestmark = pytest.mark.slow

MIB = 2**20
LIMIT_MB = 100
OPTIONS = ("--maxmemory", f"{LIMIT_MB}mb", "--maxmemory-policy", "volatile-lru", "--notify-keyspace-events", "E$e")
# The budget is long: a fallback because the machine is busy with chunks would look like a refused write.
CONFIG: dict[str, Any] = {
    "redis": PATIENT_REDIS,
    "health": {"timeout_s": 5},
}
CHUNK_TTL_S = 3600
# One script: no chunk can get a TTL before the last chunk is stored or refused.
FLOOD = """
local value = string.rep('x', tonumber(ARGV[2]))
for number = 1, tonumber(ARGV[1]) do
  redis.pcall('SET', 'kvchunk@model@01000100@1@' .. string.format('%064x', number), value)
end
"""


class Filler:
    """Acts on Redis like LMCache's servers: threads store chunks of 1 MiB and load some until `stop`."""

    def __init__(self, port: int, ttl_s: int | None) -> None:
        self.stored = 0
        self.refused = 0
        self._port = port
        self._ttl_s = ttl_s
        self._numbers = itertools.count()
        self._is_stopping = threading.Event()

    def fill(self) -> None:
        with sync_redis.Redis(port=self._port) as client:
            while not self._is_stopping.is_set():
                number = next(self._numbers)
                try:
                    client.set(f"kvchunk@model@01000100@0@{number:064x}", bytes(MIB), ex=self._ttl_s)
                    self.stored += 1
                except OutOfMemoryError:
                    self.refused += 1
                client.get(f"kvchunk@model@01000100@0@{number // 2:064x}")

    def stop(self) -> None:
        self._is_stopping.set()


@asynccontextmanager
async def filling(port: int, ttl_s: int | None, threads: int = 2) -> AsyncIterator[Filler]:
    filler = Filler(port, ttl_s)
    async with asyncio.TaskGroup() as running:
        for _ in range(threads):
            running.create_task(asyncio.to_thread(filler.fill))
        try:
            yield filler
        finally:
            filler.stop()


class Evicted:
    """Every key that Redis reports as evicted."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.keys: list[str] = []
        self._events = client.pubsub(ignore_subscribe_messages=True)

    async def listen(self) -> None:
        await self._events.subscribe("__keyevent@0__:evicted")
        async for message in self._events.listen():
            self.keys.append(message["data"])


@pytest.fixture(scope="module")
def full_cluster() -> Iterator[Stage]:
    with (
        running_redis(options=OPTIONS) as server,
        running_cluster(
            gateways=2,
            replicas=3,
            replica_arguments=("--speed", "20"),
            config={**CONFIG, "store": {"chunk_ttl_s": CHUNK_TTL_S}},
            redis_url=server.url,
        ) as cluster,
    ):
        yield Stage(cluster, server)


@pytest.fixture
async def full(full_cluster: Stage) -> AsyncIterator[Stage]:
    async with (
        httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_keepalive_connections=None)) as http,
        redis.Redis.from_url(full_cluster.redis.url, decode_responses=True, protocol=2) as client,
    ):
        full_cluster.http, full_cluster.ledger = http, Ledger(client, full_cluster.cluster.pool)
        yield full_cluster
        await eventually(full_cluster.all_load_is_given_back)


@asynccontextmanager
async def evictions(stage: Stage) -> AsyncIterator[Evicted]:
    async with AsyncExitStack() as stack:
        client = redis.Redis.from_url(stage.redis.url, decode_responses=True, protocol=2)
        evicted = Evicted(await stack.enter_async_context(client))
        task = asyncio.ensure_future(evicted.listen())
        try:
            yield evicted
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def served(load: Load, requests: int) -> None:
    """Wait until the load has had this many more answers."""
    before = load.answered
    await eventually(lambda: load.answered >= before + requests)


async def failures(stage: Stage, load: Load) -> list[str]:
    """Failed requests, placements that fell back, and connections to Redis that gateways gave up."""
    found = list(load.failures)
    if fallbacks := await stage.metric_of_all("kvgate_decisions_total", state="fallback"):
        found.append(f"{fallbacks:.0f} placements fell back")
    if (connections := await stage.metric_of_all("kvgate_store_connections_total")) != len(stage.urls):
        found.append(f"{connections:.0f} connections to Redis")
    return found


async def is_resident(stage: Stage, text: str) -> bool:
    """Whether an agent has confirmed that some replica holds each key of a prompt."""
    chain = (await stage.explain(text))["chain"]
    return all(any(owner["kind"] == "resident" for owner in key["owners"]) for key in chain)


def has_a_ttl(key: str) -> bool:
    """Whether this KVGate key lives for a minute and may be evicted earlier."""
    return bool({"chunk", "measured"} & set(key.split(":")))


async def lasting_keys(client: redis.Redis) -> set[str]:
    """KVGate's keys that outlive requests, unlike the keys of prompts and of requests in flight."""
    keys = {key async for key in client.scan_iter("kvgate:*")}
    return {key for key in keys if not has_a_ttl(key) and not {"own", "flight"} & set(key.split(":"))}


async def known_prompts(stage: Stage, count: int) -> list[str]:
    """New prompts whose replicas the agents have confirmed."""
    texts = [stage.new_prompt() for _ in range(count)]
    for number, text in enumerate(texts):
        assert is_complete(await ask(stage.http, stage.urls[number % 2], text))
    await are_resident(stage, texts)
    return texts


async def are_resident(stage: Stage, texts: list[str]) -> None:
    for text in texts:
        await eventually(lambda text=text: is_resident(stage, text))


async def test_redis_filled_with_chunks_loses_no_coordination_and_refuses_it_no_write(full: Stage) -> None:
    async with evictions(full) as evicted:
        before = await known_prompts(full, 5)
        keys = await lasting_keys(evicted.client)
        async with running_load(Load(full.http, full.urls)) as load, filling(full.redis.port, CHUNK_TTL_S) as filler:
            await eventually(lambda: filler.stored > LIMIT_MB, within_s=60)
            meanwhile = await known_prompts(full, 5)
            await eventually(lambda: filler.stored > 3 * LIMIT_MB, within_s=60)
            await served(load, 50)
        await are_resident(full, before + meanwhile)
        assert await failures(full, load) == []
        assert keys - await lasting_keys(evicted.client) == set()
        assert await full.ledger.ownership_problems() == []
        assert filler.refused == 0
        assert not [name for name in await evicted.client.info("errorstats") if "OOM" in name]
        assert sum(kind_of(key) == "chunk" for key in evicted.keys) > LIMIT_MB
        assert {key for key in evicted.keys if kind_of(key) != "chunk" and not has_a_ttl(key)} == set()


async def test_chunks_without_a_ttl_are_refused_for_a_moment_while_requests_are_placed(full: Stage) -> None:
    """The chunks arrive too fast for the watcher to give them a TTL. KVGate's scripts can still write while Redis can
    evict nothing."""
    async with evictions(full) as evicted:
        await evicted.client.delete(*[key async for key in evicted.client.scan_iter("kvchunk@*")])
        before = await known_prompts(full, 5)
        keys = await lasting_keys(evicted.client)
        async with running_load(Load(full.http, full.urls)) as load, filling(full.redis.port, None) as filler:
            await evicted.client.eval(FLOOD, 0, LIMIT_MB, MIB)
            await eventually(lambda: filler.refused, within_s=60)
            stored = filler.stored
            await eventually(lambda: filler.stored > stored + LIMIT_MB, within_s=60)
            await served(load, 50)
        await are_resident(full, [*before, *await known_prompts(full, 5)])
        assert await failures(full, load) == []
        assert keys - await lasting_keys(evicted.client) == set()
        await eventually(lambda: full.metric_of_all("kvgate_store_ttls_given_total"))
        await eventually(lambda: have_ttls(evicted.client))


async def have_ttls(client: redis.Redis) -> bool:
    chunks = [key async for key in client.scan_iter("kvchunk@*")]
    return bool(chunks) and all([0 < await client.ttl(key) <= CHUNK_TTL_S for key in chunks])


async def test_what_is_wrong_with_it_is_told_by_kvgate_status(full: Stage) -> None:
    async def told() -> str:
        (store,) = [one for one in await cluster_status(full.cluster.state_dir) if one.kind == "redis"]
        assert store.state == "ready"
        return store.detail

    async def is_told_the_policy() -> bool:
        return "maxmemory-policy is allkeys-lru" in await told()

    async def is_told_no_policy() -> bool:
        return not await is_told_the_policy()

    async with redis.Redis.from_url(full.redis.url, decode_responses=True, protocol=2) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
        await eventually(is_told_the_policy)
        await client.config_set("maxmemory-policy", "volatile-lru")
        await eventually(is_told_no_policy)


async def test_one_gateway_tells_of_the_store_and_when_it_is_killed_the_other_does(full: Stage) -> None:
    used = "kvgate_store_used_memory_bytes"

    async def tellers() -> list[int]:
        return [number for number, url in enumerate(full.urls) if await full.metric(url, used)]

    (watcher,) = await eventually(tellers)
    assert await full.metric(full.urls[watcher], "kvgate_store_maxmemory_bytes") == LIMIT_MB * MIB
    assert await full.metric(full.urls[watcher], "kvgate_store_estimated_keys", kind="coordination") > 0
    process = full.cluster.gateway_processes[watcher]
    process.kill()
    other = full.urls[1 - watcher]
    await eventually(lambda: full.metric(other, used))
    process.start()
    await eventually(lambda: full.listens(full.urls[watcher]))
