"""Prompts that LMCache stores in the gateways' Redis: three replicas with LMCache and agents, behind two gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as redis

from bench.cluster import Cluster, SimReplica, running_gateways, running_replicas
from coordinator.keys import PoolKeys
from tests.cluster.clients import ask, held_stream, prose
from tests.cluster.conftest import CONFIG, REPLICA_ARGUMENTS
from tests.cluster.test_both_tiers import explained
from tests.cluster.test_shared_placement import cached_tokens, replica_of
from tests.polling import eventually
from tests.redis_server import running_redis

CHUNK_TOKENS = 64
_CHUNKS = "kvchunk@*"


@dataclass
class Stage:
    replicas: dict[str, SimReplica]
    gateways: list[str]
    keys: PoolKeys
    store: redis.Redis
    http: httpx.AsyncClient

    async def chunks(self) -> set[str]:
        return {key async for key in self.store.scan_iter(match=_CHUNKS, count=1000)}

    async def compute(self, text: str) -> tuple[str, set[str]]:
        """Sends a new prompt. Returns its replica and its new chunks, once they are in Redis and in the map."""
        before = await self.chunks()
        answer = await ask(self.http, self.gateways[0], text)
        count = answer.json()["usage"]["prompt_tokens"] // CHUNK_TOKENS
        assert count >= 2
        new = await eventually(lambda: self._new_chunks(before, count))
        await eventually(lambda: self._is_known(text, count * CHUNK_TOKENS))
        return replica_of(answer), new

    async def forget(self, owner: str, text: str) -> None:
        """Empties a replica's GPU cache and waits until the map knows it."""
        url = self.replicas[owner].url
        assert (await self.http.post(f"{url}/reset_prefix_cache")).json()["reset"]
        step = {"model": "sim", "prompt": "It says so with its next step.", "max_tokens": 1}
        (await self.http.post(f"{url}/v1/completions", json=step)).raise_for_status()
        await eventually(lambda: self._is_on_no_gpu(text))

    async def explained(self, text: str, gateway: int = 0) -> dict[str, Any]:
        return await explained(self.http, self.gateways[gateway], text)

    async def is_idle(self, replica: str) -> bool:
        return await self.store.hget(self.keys.active, replica) in (None, "0")

    async def _new_chunks(self, before: set[str], count: int) -> set[str]:
        new = await self.chunks() - before
        return new if len(new) == count else set()

    async def _is_known(self, text: str, tokens: int) -> bool:
        """Whether the owner's events have confirmed the whole prompt, and its agent this many tokens in chunks."""
        chain = (await self.explained(text))["chain"]
        confirmed = all(one["kind"] == "resident" for key in chain for one in key["owners"])
        records = await self.store.mget([self.keys.chunk(key["key"]) for key in chain])
        return confirmed and any(record.startswith(f"{tokens} ") for record in records if record)

    async def _is_on_no_gpu(self, text: str) -> bool:
        return all(one["matched_tokens"] == 0 for one in (await self.explained(text))["replicas"])


def stored_tokens(answer: httpx.Response) -> int:
    """The tokens that can be loaded, according to a decision."""
    fields = dict(part.strip().partition("=")[::2] for part in answer.headers["x-kvgate-decision"].split(";"))
    return int(fields.get("stored_tokens", 0))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("tiers")
    with running_redis() as server:
        # Stored with the answer, nearly.
        told = f"redis_url={server.url},chunk_tokens={CHUNK_TOKENS},redis_bytes_per_s=1e12"
        lmcache = ("--lmcache", told)
        with running_replicas(folder, 3, (*REPLICA_ARGUMENTS, *lmcache)) as replicas:
            urls = {replica.id: replica.url for replica in replicas}
            beside = {replica: f"lmcache={url}/lmcache" for replica, url in urls.items()}
            with running_gateways(urls, config=CONFIG, redis_url=server.url, beside=beside) as gateways:
                yield replace(gateways, replicas=replicas)


@pytest.fixture
async def stage(cluster: Cluster, http: httpx.AsyncClient) -> AsyncIterator[Stage]:
    replicas = {replica.id: replica for replica in cluster.replicas}
    async with redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as store:
        yield Stage(replicas, cluster.gateway_urls, PoolKeys(cluster.pool), store, http)


async def test_what_only_redis_holds_goes_to_the_least_loaded_replica_which_loads_it(stage: Stage) -> None:
    first, second = stage.gateways
    text = prose("stored")
    async with AsyncExitStack() as held:
        ends_early = await held.enter_async_context(AsyncExitStack())
        idle = (await ends_early.enter_async_context(held_stream(stage.http, first, "one"))).replica
        busy = (await held.enter_async_context(held_stream(stage.http, second, "two"))).replica
        owner, _ = await stage.compute(text)
        assert sorted([idle, busy, owner]) == ["r0", "r1", "r2"]
        await stage.forget(owner, text)
        assert (await held.enter_async_context(held_stream(stage.http, first, "three"))).replica == owner
        await ends_early.aclose()
        await eventually(lambda: stage.is_idle(idle))

        told = await stage.explained(text)
        answer = await ask(stage.http, second, text)
    assert (told["choice"]["why"], told["choice"]["replica"]) == ("stored", idle)
    assert len({one["credit_tokens"] for one in told["replicas"]}) == 1
    assert replica_of(answer) == idle
    assert answer.headers["x-kvgate-decision"].startswith("stored;")
    assert cached_tokens(answer) == stored_tokens(answer) == told["choice"]["stored_tokens"] >= 2 * CHUNK_TOKENS


async def test_a_chunk_that_was_deleted_is_not_counted_on_by_any_gateway(stage: Stage) -> None:
    text = prose("deleted")
    owner, chunks = await stage.compute(text)
    await stage.forget(owner, text)
    assert (await stage.explained(text))["choice"]["why"] == "stored"
    await stage.store.delete(*chunks)
    for gateway in (0, 1):
        choice = (await stage.explained(text, gateway))["choice"]
        assert (choice["why"], choice["stored_tokens"]) == ("cold", 0)
    answer = await ask(stage.http, stage.gateways[1], text)
    assert answer.headers["x-kvgate-decision"].startswith("cold;")
    assert (cached_tokens(answer), stored_tokens(answer)) == (0, 0)


async def test_a_gpu_that_holds_a_prompt_is_preferred_to_idle_replicas_that_could_load_it(stage: Stage) -> None:
    text = prose("on a GPU")
    owner, _ = await stage.compute(text)
    async with held_stream(stage.http, stage.gateways[0], text) as stream:
        assert stream.replica == owner
        credit = {one["replica"]: one["credit_tokens"] for one in (await stage.explained(text))["replicas"]}
        held = credit.pop(owner)
        assert all(0 < loadable < held for loadable in credit.values())
        answer = await ask(stage.http, stage.gateways[1], text)
    assert replica_of(answer) == owner
    assert answer.headers["x-kvgate-decision"].startswith("hit;")
    assert (cached_tokens(answer) > 0, stored_tokens(answer)) == (True, 0)
