"""Two gateways in front of two real engines that share the gateways' Redis. Placement counts the cost of loading for
prompts that are only in Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import running_gateways
from bench.vllm import install
from bench.vllm.printed import replica_file
from coordinator.keys import PoolKeys, pool_slug
from tests.lmcache.conftest import SHARED
from tests.lmcache.stage import CHUNK_TOKENS, Chunks, Replica, running
from tests.polling import eventually
from tests.redis_server import RedisServer
from tests.vllm.workload import text

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(900)]

CONFIG: dict[str, Any] = {"redis": {"budget_ms": 500}, "health": {"timeout_s": 5}}
PROMPT_BYTES = 7500


@dataclass
class Placed:
    replica: str
    decision: str
    cached_tokens: int

    @property
    def stored_tokens(self) -> int:
        fields = dict(part.strip().partition("=")[::2] for part in self.decision.split(";"))
        return int(fields.get("stored_tokens", 0))


@dataclass
class Stage:
    replicas: dict[str, Replica]
    urls: list[str]
    keys: PoolKeys
    chunks: Chunks
    store: redis.Redis
    http: httpx.AsyncClient

    async def ask(self, prompt: str, gateway: int = 0, max_tokens: int = 1) -> Placed:
        body = {"model": install.MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
        answer = await self.http.post(f"{self.urls[gateway]}/v1/chat/completions", json=body)
        assert answer.is_success, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        headers = answer.headers
        return Placed(headers["x-kvgate-replica"], headers["x-kvgate-decision"], details.get("cached_tokens", 0))

    async def teach_sizes(self) -> None:
        """Lets each gateway learn how many tokens this model's texts have. It counts no chunk that ends beyond its own
        estimate."""
        for number in range(4 * len(self.urls)):
            await self.ask(text(f"size {number}", PROMPT_BYTES), number % len(self.urls))

    async def explain(self, prompt: str, gateway: int = 0) -> dict[str, Any]:
        body = {"model": install.MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 1}
        answer = await self.http.post(f"{self.urls[gateway]}/v1/route/explain", json=body)
        told: dict[str, Any] = answer.raise_for_status().json()
        return told

    async def stored(self, prompt: str) -> None:
        """Sends a new prompt and waits until LMCache has stored it in Redis and the map knows it."""
        before = self.chunks.keys()
        await self.ask(prompt)
        self.chunks.new_since(before, 2)
        await eventually(lambda: self.is_named(prompt))

    async def is_named(self, prompt: str) -> bool:
        """Whether the agent has named the last chunk that ends within the keys of the prompt: it names a chunk with the
        key in which the chunk ends, from first to last."""
        chain = (await self.explain(prompt))["chain"]
        resident = max((one["tokens"] for one in chain[-1]["owners"] if one["kind"] == "resident"), default=0)
        names = await self.store.mget([self.keys.chunk(key["key"]) for key in chain])
        named = max((int(name.split()[0]) for name in names if name), default=0)
        return resident > 0 and named == resident // CHUNK_TOKENS * CHUNK_TOKENS

    async def forget(self) -> None:
        """Empties every engine's cache, and sends a request so that the engine publishes it."""
        for replica in self.replicas.values():
            replica.forget()
            await asyncio.to_thread(replica.ask, "It says so with its next step.", 1)

    async def is_forgotten(self, prompt: str) -> bool:
        return all(one["matched_tokens"] == 0 for one in (await self.explain(prompt))["replicas"])

    async def busy(self) -> list[str]:
        """The replicas that have requests in flight."""
        return [name for name, count in (await self.store.hgetall(self.keys.active)).items() if count != "0"]

    async def tiers(self) -> dict[str, list[str]]:
        """The savings of loading from CPU memory and from Redis, according to each replica's agent."""
        return {name: said.split(" ") for name, said in (await self.store.hgetall(self.keys.tiers)).items()}


@pytest.fixture(scope="module")
def cluster(
    redis_server: RedisServer, secrets: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[Replica], list[str]]]:
    folder: Path = tmp_path_factory.mktemp("placement")
    files = [
        replica_file(name, redis_server.url, {"cpu_gb": 0.25, "keep_in_cpu": False, "redis": SHARED}) for name in "ab"
    ]
    with running(folder, *files, secrets=secrets) as replicas:
        urls = {replica.engine.id: replica.engine.url for replica in replicas}
        beside = {
            replica.engine.id: f"lmcache={replica.server.url}" for replica in replicas if replica.server is not None
        }
        with running_gateways(urls, config=CONFIG, redis_url=redis_server.url, beside=beside) as gateways:
            yield replicas, gateways.gateway_urls


@pytest.fixture
async def stage(cluster: tuple[list[Replica], list[str]], redis_server: RedisServer) -> AsyncIterator[Stage]:
    replicas, urls = cluster
    keys = PoolKeys(pool_slug(str(install.model(install.TINY))))
    async with (
        httpx.AsyncClient(timeout=120) as http,
        redis.Redis.from_url(redis_server.url, decode_responses=True) as store,
    ):
        by_id = {replica.engine.id: replica for replica in replicas}
        yield Stage(by_id, urls, keys, Chunks(redis_server), store, http)


async def test_what_only_redis_holds_goes_to_the_least_loaded_replica_which_loads_it(stage: Stage) -> None:
    await stage.teach_sizes()
    prompt = text("stored", PROMPT_BYTES)
    await stage.stored(prompt)
    await stage.forget()
    await eventually(lambda: stage.is_forgotten(prompt))
    told = await stage.explain(prompt)
    assert told["choice"]["why"] == "stored"
    assert told["choice"]["stored_tokens"] >= 2 * CHUNK_TOKENS
    assert len({one["credit_tokens"] for one in told["replicas"]}) == 1

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stage.ask(text("long", 300), max_tokens=600))
        loaded = await eventually(stage.busy)
        placed = await stage.ask(prompt, gateway=1)
    assert [placed.replica] != loaded
    assert placed.decision.startswith("stored;")
    assert placed.cached_tokens == placed.stored_tokens == told["choice"]["stored_tokens"]


async def test_what_loading_saves_is_measured(stage: Stage) -> None:
    for number in range(3):
        prompt = text(f"measured {number}", PROMPT_BYTES)
        await stage.stored(prompt)
        await stage.forget()
        await eventually(lambda prompt=prompt: stage.is_forgotten(prompt))
        await stage.ask(prompt, gateway=number % 2)

    async def is_measured() -> bool:
        return any(store not in ("-", "?") for _, store in (await stage.tiers()).values())

    await eventually(is_measured, within_s=20)
    measured = {name: float(store) for name, (_, store) in (await stage.tiers()).items() if store not in ("-", "?")}
    assert all(0 < credit <= 1 for credit in measured.values()), json.dumps(measured)


async def test_a_chunk_that_is_gone_is_not_counted_on(stage: Stage) -> None:
    prompt = text("deleted", PROMPT_BYTES)
    before = stage.chunks.keys()
    await stage.stored(prompt)
    await stage.forget()
    await eventually(lambda: stage.is_forgotten(prompt))
    whole = (await stage.explain(prompt))["choice"]["stored_tokens"]
    await stage.store.delete(*(key.decode() for key in stage.chunks.keys() - before))
    told = (await stage.explain(prompt, gateway=1))["choice"]
    assert (whole >= 2 * CHUNK_TOKENS, told["stored_tokens"], told["why"]) == (True, 0, "cold")
    placed = await stage.ask(prompt)
    assert (placed.cached_tokens, placed.stored_tokens) == (0, 0)
