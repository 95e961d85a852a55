"""A model's name whose replicas run different models, as in an update of weights: they are in different pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio as redis

from bench.cluster import Cluster, SimReplica
from coordinator.keys import PoolKeys, pool_slug
from tests.cluster.clients import CHAT, ask, chat, held_stream, prose
from tests.cluster.gateways import GatewayProcess, another_gateway
from tests.cluster.servers import another_server
from tests.polling import eventually

OLD, NEW = "kvgate/weights-1", "kvgate/weights-2"
SERVED = ("--served-name", "prod")


def listed(**servers: SimReplica) -> dict[str, Any]:
    replicas = [{"id": f"weights-{name}", "url": server.url} for name, server in servers.items()]
    return {"replicas": replicas, "health": {"timeout_s": 2}}


@asynccontextmanager
async def two_gateways(
    cluster: Cluster, name: str, settings: dict[str, Any]
) -> AsyncIterator[tuple[GatewayProcess, GatewayProcess]]:
    async with (
        another_gateway(cluster, f"{name}-1", **settings) as one,
        another_gateway(cluster, f"{name}-2", **settings) as two,
    ):
        yield one, two


async def where(http: httpx.AsyncClient, urls: tuple[str, ...], count: int = 40) -> dict[str, list[int]]:
    """The statuses that each replica's answers had, or "" for none, of prompts that share nothing."""
    found: dict[str, list[int]] = {}
    asked = [ask(http, urls[n % len(urls)], prose(f"{id(found)} {n}", 60), model="prod") for n in range(count)]
    for answer in await asyncio.gather(*asked):
        found.setdefault(answer.headers.get("x-kvgate-replica", ""), []).append(answer.status_code)
    return found


async def ready(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    body: dict[str, Any] = (await http.get(f"{url}/ready")).json()
    return body


async def test_all_replicas_serve_through_an_update_of_weights_and_no_death_takes_the_name_down(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with (
        another_server(http, tmp_path, "--model", OLD, *SERVED) as a,
        another_server(http, tmp_path, "--model", OLD, *SERVED) as b,
        another_server(http, tmp_path, "--model", NEW, *SERVED) as c,
        two_gateways(cluster, "update", listed(a=a, b=b, c=c)) as (one, two),
    ):
        urls = one.url, two.url
        pools = [pool_slug(OLD), pool_slug(NEW)]
        for url in urls:
            await eventually(lambda url=url: _says(http, url, "models_in_several_pools", {"prod": sorted(pools)}))
        served = await where(http, urls)
        assert served.keys() == {"weights-a", "weights-b", "weights-c"}
        assert {status for statuses in served.values() for status in statuses} == {200}

        conversation: list[dict[str, str]] = [{"role": "user", "content": prose("a conversation")}]
        stays = set()
        for turn in range(4):
            answer = await http.post(urls[turn % 2] + CHAT, json=chat("", model="prod", messages=conversation))
            stays.add(answer.headers["x-kvgate-replica"])
            conversation += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
        assert len(stays) == 1, "a conversation stays in its pool, through every gateway"

        c.kill()
        assert (await where(http, urls)).keys() == {"weights-a", "weights-b"}, "the last pool that came owns nothing"
        for url in urls:
            await eventually(lambda url=url: _says(http, url, "models_in_several_pools", None))
        c.start()
        for url in urls:
            await eventually(lambda url=url: _says(http, url, "models_in_several_pools", {"prod": sorted(pools)}))
        a.kill()
        b.kill()
        assert (await where(http, urls)).keys() == {"weights-c"}, "the old pool has no replica left"
        c.kill()
        await eventually(lambda: _says(http, two.url, "models_down", ["prod"]))
        await eventually(lambda: "no replica is ready for a model" in two.log.read_text())


async def _says(http: httpx.AsyncClient, url: str, field: str, value: object) -> bool:
    return bool((await ready(http, url)).get(field) == value)


async def test_a_replica_with_new_weights_leaves_the_pool_of_the_old_ones(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with (
        another_server(http, tmp_path, "--model", OLD, *SERVED) as a,
        another_server(http, tmp_path, "--model", OLD, *SERVED) as b,
        two_gateways(cluster, "leaves", listed(stays=a, leaves=b)) as (one, two),
        redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client,
    ):
        old, new = PoolKeys(pool_slug(OLD)).replicas, PoolKeys(pool_slug(NEW)).replicas
        await eventually(lambda: client.hexists(old, "weights-leaves"))
        b.kill()
        b.arguments = tuple(NEW if each == OLD else each for each in b.arguments)
        b.start()
        await eventually(lambda: client.hexists(new, "weights-leaves"))
        await eventually(lambda: _is_gone(client, old, "weights-leaves"))
        for url in (one.url, two.url):
            await eventually(lambda url=url: _serves_all(http, url))


async def _is_gone(client: redis.Redis, key: str, replica: str) -> bool:
    return not await client.hexists(key, replica)


async def _serves_all(http: httpx.AsyncClient, url: str) -> bool:
    return (await where(http, (url,))).keys() == {"weights-stays", "weights-leaves"}


async def test_requests_that_wait_in_a_pool_whose_replicas_die_go_to_another_pool(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with (
        another_server(http, tmp_path, "--model", OLD, *SERVED) as old,
        another_server(http, tmp_path, "--model", NEW, *SERVED) as new,
    ):
        settings = listed(old=old, new=new) | {"policy": {"max_active_requests": 1}}
        async with (
            two_gateways(cluster, "waits", settings) as (one, two),
            redis.Redis.from_url(cluster.redis_url, decode_responses=True, protocol=2) as client,
        ):
            for server in (old, new):
                await http.post(f"{server.url}/sim/fail", json={"mode": "hang", "after_tokens": 1})
            streams = [held_stream(http, one.url, prose(n), model="prod") for n in range(2)]
            held = [await stream.__aenter__() for stream in streams]
            assert {stream.replica for stream in held} == {"weights-old", "weights-new"}
            urls = one.url, two.url
            asked = [ask(http, urls[n % 2], prose(f"{n} waits"), model="prod") for n in range(12)]
            tasks = [asyncio.ensure_future(each) for each in asked]
            await eventually(lambda: _are_waiting(client, len(tasks)))
            old.kill()
            await http.post(f"{new.url}/sim/fail", json={"mode": "none"})
            for stream in streams:
                await stream.__aexit__(None, None, None)
            answers = await asyncio.gather(*tasks)
            assert {(each.status_code, each.headers["x-kvgate-replica"]) for each in answers} == {(200, "weights-new")}


async def _are_waiting(client: redis.Redis, count: int) -> bool:
    waiting = [await client.hvals(PoolKeys(pool_slug(model)).waiting) for model in (OLD, NEW)]
    return sum(int(each) for values in waiting for each in values) == count and all(waiting)


async def test_prompts_go_to_replicas_that_are_long_enough(
    cluster: Cluster, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    short, long = (("--model", "kvgate/lengths", *SERVED, "--num-gpu-blocks", str(blocks)) for blocks in (256, 4096))
    async with (
        another_server(http, tmp_path, *short) as few,
        another_server(http, tmp_path, *long) as many,
        two_gateways(cluster, "lengths", listed(short=few, long=many)) as (one, two),
    ):
        for url in (one.url, two.url):
            (card,) = (await http.get(f"{url}/v1/models")).json()["data"]
            assert card["max_model_len"] == 4096 * 16
            for n in range(6):
                answer = await ask(http, url, prose(n, 4000), model="prod")
                assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, "weights-long")
        assert (await where(http, (one.url, two.url))).keys() == {"weights-short", "weights-long"}
