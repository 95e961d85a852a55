"""All gateways know the placements of each gateway: the next request may come through any of them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from bench.cluster import Cluster
from tests.cluster.clients import CHAT, HeldStream, ask, chat, held_stream, prose
from tests.cluster.ledger import Ledger
from tests.polling import eventually

MIN_SLACK_REQUESTS = 8
LOAD_FACTOR = 1.5


def replica_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvgate-replica"]


def matched_tokens(answer: httpx.Response) -> int:
    return int(answer.headers["x-kvgate-matched-tokens"])


def cached_tokens(answer: httpx.Response) -> int:
    details = answer.json()["usage"]["prompt_tokens_details"] or {}  # engines leave out a zero
    return int(details.get("cached_tokens", 0))


@asynccontextmanager
async def many_streams(http: httpx.AsyncClient, cluster: Cluster, texts: list[str]) -> AsyncIterator[list[HeldStream]]:
    """Opens all streams at once, through the gateways in turn."""
    async with AsyncExitStack() as stack:
        urls = cluster.gateway_urls
        yield await asyncio.gather(
            *(stack.enter_async_context(held_stream(http, urls[n % len(urls)], text)) for n, text in enumerate(texts))
        )


async def test_a_prompt_that_came_through_one_gateway_is_found_through_every_other(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    first, *others = cluster.gateway_urls
    text = prose("known to all")
    began = await ask(http, first, text)
    assert matched_tokens(began) == 0
    for url in others:
        answer = await ask(http, url, f"{text} And another question?")
        assert replica_of(answer) == replica_of(began)
        assert matched_tokens(answer) > 400
        assert cached_tokens(answer) > 400


async def test_a_conversation_stays_with_its_replica_whichever_gateways_it_comes_through(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    messages = [{"role": "user", "content": prose("a conversation", words=100)}]
    replicas, cached = [], []
    for turn in range(6):
        url = cluster.gateway_urls[turn % 3]
        answer = await http.post(url + CHAT, json={"model": "sim", "max_tokens": 8, "messages": messages})
        replicas.append(replica_of(answer))
        cached.append(cached_tokens(answer))
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": f"Turn {turn}: {prose(turn, words=30)}"})
    assert len(set(replicas)) == 1
    assert cached == sorted(cached)
    assert cached[1] > 0


async def test_cold_prompts_that_arrive_everywhere_at_once_do_not_herd(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger
) -> None:
    await eventually(lambda: is_drained(ledger))
    async with many_streams(http, cluster, [prose(f"burst {n}") for n in range(24)]) as streams:
        shares = Counter(stream.replica for stream in streams)
        assert sorted(shares) == ["r0", "r1", "r2"]
        assert max(shares.values()) - min(shares.values()) <= 2
        assert (await ledger.sums()).active == dict(shares)
    await eventually(lambda: is_drained(ledger))


async def test_a_prefix_that_everybody_wants_gains_owners_as_its_owner_fills(
    cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger
) -> None:
    text = prose("wanted by all")
    await ask(http, cluster.gateway_urls[0], text)
    async with many_streams(http, cluster, [f"{text} Question {n}?" for n in range(24)]) as streams:
        shares = Counter(stream.replica for stream in streams)
        assert len(shares) > 1
        assert max(shares.values()) <= max(MIN_SLACK_REQUESTS, LOAD_FACTOR * len(streams) / 3) + 1
    await eventually(lambda: is_drained(ledger))


async def is_drained(ledger: Ledger) -> bool:
    sums = await ledger.sums()
    assert not sums.problems(), sums.problems()
    return sums.are_zero


@pytest.mark.parametrize("policy", ["consistent_hash", "prefix_kv_aware"])
async def test_every_gateway_decides_alike(cluster: Cluster, http: httpx.AsyncClient, policy: str) -> None:
    headers = {"x-kvgate-policy": policy}
    for n in range(6):
        body = chat(prose(f"decided alike by {policy} {n}"))
        answers = [await http.post(url + CHAT, json=body, headers=headers) for url in cluster.gateway_urls]
        assert len({replica_of(answer) for answer in answers}) == 1


async def test_an_unknown_model_leaves_no_trace(cluster: Cluster, http: httpx.AsyncClient, ledger: Ledger) -> None:
    numbers = itertools.count()

    async def is_measured() -> bool:
        await ask(http, cluster.gateway_urls[0], prose(f"measured {next(numbers)}"))
        return any(key.endswith(":rates") for key in await ledger.all_keys())

    await eventually(is_measured)  # else an agent may write that key now
    before = await ledger.all_keys()
    answer = await http.post(cluster.gateway_urls[0] + CHAT, json=chat("hello") | {"model": "nobody/serves-this"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert await ledger.all_keys() <= before


async def test_a_burst_after_an_idle_time_meets_no_closed_connection(cluster: Cluster, http: httpx.AsyncClient) -> None:
    """vLLM closes a connection that was idle for 5 s. A request on such a connection would be lost, or seem lost."""

    async def burst() -> list[httpx.Response]:
        return await asyncio.gather(*(ask(http, cluster.gateway_urls[n % 3], f"burst {n}") for n in range(30)))

    await burst()
    await asyncio.sleep(5.2)
    for answer in await burst():
        assert answer.status_code == 200
    for url in cluster.gateway_urls:
        assert "kvgate_retries_total{" not in (await http.get(f"{url}/metrics")).text
