"""The map tells a replica's blocks in GPU memory from its blocks in CPU memory. These tests have their own clusters."""

from __future__ import annotations

import itertools
from typing import Any

import httpx

from bench.cluster import Cluster, running_cluster
from tests.cluster.clients import ask, chat, prose
from tests.cluster.conftest import CONFIG
from tests.cluster.test_shared_placement import cached_tokens, matched_tokens, replica_of
from tests.polling import eventually

GPU_BLOCKS = 128
ARGUMENTS = ("--speed", "20", "--num-gpu-blocks", str(GPU_BLOCKS), "--cpu-blocks", "1024")
BLOCK_TOKENS = 16
_numbers = itertools.count()


async def test_what_left_the_gpu_for_cpu_memory_is_still_worth_a_visit_and_comes_back(http: httpx.AsyncClient) -> None:
    with running_cluster(replicas=3, replica_arguments=ARGUMENTS, config=CONFIG) as cluster:
        first, second = cluster.gateway_urls
        text = prose("both tiers")
        owner = replica_of(await ask(http, first, text))
        await eventually(lambda: is_on(http, second, text, owner, {"gpu"}))

        await crowd_out(http, cluster, owner)
        await eventually(lambda: is_on(http, second, text, owner, {"cpu"}))
        (cost,) = [one for one in (await explained(http, first, text))["replicas"] if one["replica"] == owner]
        assert 0 < cost["credit_tokens"] < cost["matched_tokens"]

        again = await ask(http, second, text)
        assert replica_of(again) == owner
        assert again.headers["x-kvgate-decision"].startswith("hit")
        assert cached_tokens(again) >= matched_tokens(again) > 0
        await eventually(lambda: is_on(http, first, text, owner, {"gpu"}))


async def test_what_left_cpu_memory_as_well_is_gone(http: httpx.AsyncClient) -> None:
    with running_cluster(replicas=3, replica_arguments=(*ARGUMENTS[:-1], str(GPU_BLOCKS)), config=CONFIG) as cluster:
        first, second = cluster.gateway_urls
        text = prose("neither tier")
        owner = replica_of(await ask(http, first, text))
        await eventually(lambda: is_on(http, second, text, owner, {"gpu"}))
        for _ in range(2):
            await crowd_out(http, cluster, owner)
        await eventually(lambda: is_on(http, second, text, owner, set()))
        assert cached_tokens(await ask(http, second, text)) == 0


async def crowd_out(http: httpx.AsyncClient, cluster: Cluster, replica: str) -> None:
    """Directly on the replica, fill its GPU cache with other prompts, in two halves that fit its CPU cache."""
    (url,) = [each.url for each in cluster.replicas if each.id == replica]
    for half in range(2):
        prompt = f"filler {half} {next(_numbers)} ".ljust((GPU_BLOCKS // 2) * BLOCK_TOKENS * 4 - 4, "x")
        body = {"model": "sim", "prompt": prompt, "max_tokens": 1}
        (await http.post(f"{url}/v1/completions", json=body)).raise_for_status()


async def explained(http: httpx.AsyncClient, gateway: str, text: str) -> dict[str, Any]:
    answer = await http.post(f"{gateway}/v1/route/explain", json=chat(text))
    answer.raise_for_status()
    return dict(answer.json())


async def is_on(http: httpx.AsyncClient, gateway: str, text: str, replica: str, media: set[str]) -> bool:
    """Whether the replica is a resident owner of all keys of a prompt on exactly these media. Without media: of no
    key."""
    chain = (await explained(http, gateway, text))["chain"]
    owners = [[one for one in key["owners"] if one["replica"] == replica and not one["stale"]] for key in chain]
    found = [one for of_key in owners for one in of_key]
    if any(one["kind"] != "resident" for one in found):
        return False
    return {one["medium"] for one in found} == media and (not media or all(owners))
