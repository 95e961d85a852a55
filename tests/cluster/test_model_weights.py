"""Models of the configuration: four gateways share a model's requests among its backends by their weights, exactly."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
import pytest
import redis.asyncio as redis
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster import Cluster, SimReplica
from coordinator.keys import shares_key
from tests.api.stage import PATIENT_REDIS, running_gateway, running_sims
from tests.cluster.clients import CHAT, ask, chat, prose
from tests.cluster.gateways import configured_like
from tests.polling import eventually

V1, V2 = "kvgate/chat-1", "kvgate/chat-2"
GATEWAYS, AT_ONCE = 4, 32


class Stage(NamedTuple):
    urls: list[str]
    servers: dict[str, SimReplica]


def model(weight_1: int, weight_2: int, **more: Any) -> dict[str, Any]:
    backends = [
        {"name": "v1", "match": {"root": V1}, "weight": weight_1},
        {"name": "v2", "match": {"labels": {"version": "v2"}}, "weight": weight_2},
    ]
    return {"name": "chat", "aliases": ["gpt-4o-mini"], "backends": backends, **more}


@pytest.fixture(scope="module")
def stage(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Two replicas of the first version, one of the second, and four gateways that send it one request in ten."""
    folder = tmp_path_factory.mktemp("weights")
    roots = {"weight-a": V1, "weight-b": V1, "weight-c": V2}
    arguments = {name: ("--model", root, "--served-name", "chat", "--speed", "20") for name, root in roots.items()}
    with ExitStack() as stack:
        servers = stack.enter_context(running_sims(folder, arguments))
        replicas = [
            {"id": sim.id, "url": sim.url, "labels": {"version": "v2" if sim.id == "weight-c" else "v1"}}
            for sim in servers
        ]
        settings = {
            "replicas": replicas,
            "models": [model(9, 1)],
            "health": {"timeout_s": 2},
            "redis": configured_like(cluster, "any")["redis"] | PATIENT_REDIS,
        }
        urls = [
            stack.enter_context(running_gateway(folder, cluster.redis_url, servers, settings)) for _ in range(GATEWAYS)
        ]
        yield Stage(urls, {sim.id: sim for sim in servers})


@pytest.fixture(autouse=True)
async def begun_anew(cluster: Cluster) -> None:
    """The test before may have ended within a turn of all."""
    async with redis.from_url(cluster.redis_url) as store:
        await store.delete(shares_key())


async def _says(http: httpx.AsyncClient, url: str, field: str, wanted: Any) -> bool:
    return bool((await http.get(f"{url}/ready")).json().get(field) == wanted)


async def versions(http: httpx.AsyncClient, stage: Stage, prompts: list[str], **fields: Any) -> Counter[str]:
    """How many of these requests each version has answered; they go through all gateways at the same time."""
    fields, turns = {"model": "chat", **fields}, asyncio.Semaphore(AT_ONCE)

    async def asked(at: int) -> httpx.Response:
        async with turns:
            return await ask(http, stage.urls[at % GATEWAYS], prompts[at], **fields)

    found: Counter[str] = Counter()
    for answer in await asyncio.gather(*map(asked, range(len(prompts)))):
        assert answer.status_code == 200, answer.text
        found["v2" if answer.headers["x-kvgate-replica"] == "weight-c" else "v1"] += 1
    return found


async def test_weights_hold_exactly_over_all_gateways(stage: Stage, http: httpx.AsyncClient) -> None:
    prompts = [prose(f"conversation {at}", 40) for at in range(200)]
    assert await versions(http, stage, prompts) == {"v1": 180, "v2": 20}


async def test_weights_hold_for_requests_that_name_no_model(stage: Stage, http: httpx.AsyncClient) -> None:
    prompts = [prose(f"no name {at}", 40) for at in range(100)]
    assert await versions(http, stage, prompts, model=None) == {"v1": 90, "v2": 10}


async def test_a_conversation_stays_with_its_version_through_every_gateway(
    stage: Stage, http: httpx.AsyncClient
) -> None:
    firsts = [prose(f"stay {at}", 40) for at in range(20)]
    for at, first in enumerate(firsts):
        seen = set()
        messages = [{"role": "user", "content": first}]
        for turn in range(4):
            url = stage.urls[(at + turn) % GATEWAYS]
            answer = await http.post(url + CHAT, json=chat("", model="chat", messages=messages))
            seen.add(answer.headers["x-kvgate-replica"] == "weight-c")
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
        assert len(seen) == 1


async def test_what_a_client_calls_one_conversation_stays_with_one_version_from_its_first_request_on(
    stage: Stage, http: httpx.AsyncClient
) -> None:
    seen: list[set[str]] = []
    for session in range(20):
        headers, replicas = {"x-kvgate-session": f"session {session}"}, set()
        for at in range(3):
            body = chat(prose(f"session {session} {at}", 40), model="chat")
            answer = await http.post(stage.urls[at] + CHAT, json=body, headers=headers)
            replicas.add("v2" if answer.headers["x-kvgate-replica"] == "weight-c" else "v1")
        seen.append(replicas)
    assert {len(each) for each in seen} == {1}
    assert set.union(*seen) == {"v1", "v2"}


async def test_every_gateway_tells_the_versions_and_their_weights(stage: Stage, http: httpx.AsyncClient) -> None:
    for url in stage.urls:
        told = (await http.get(f"{url}/ready")).json()
        assert told["models"] == {
            "chat": {"v1": {"weight": 9, "ready_replicas": 2}, "v2": {"weight": 1, "ready_replicas": 1}}
        }
        assert told.keys().isdisjoint({"weights", "models_in_several_pools", "backends_without_replicas"})
        explained = (await http.post(f"{url}/v1/route/explain", json=chat(prose("explained"), model="chat"))).json()
        assert explained["backend_by"] == "count"
        assert explained["backend_weight"] == {"v1": 9, "v2": 1}[explained["backend"]]
        listed = (await http.get(f"{url}/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["chat", "gpt-4o-mini"]


async def test_each_version_has_its_numbers(stage: Stage, http: httpx.AsyncClient) -> None:
    prompts = [prose(f"numbers {at}", 40) for at in range(40)]
    before = await asyncio.gather(*(http.get(f"{url}/metrics") for url in stage.urls))
    await versions(http, stage, prompts)
    await versions(http, stage, prompts[:20], model="gpt-4o-mini", stream=True)  # the second turn of these
    pages = await asyncio.gather(*(http.get(f"{url}/metrics") for url in stage.urls))

    def more(name: str, **labels: str) -> Counter[str]:
        return counted(pages, name, **labels) - counted(before, name, **labels)

    assert more("kvgate_backend_requests_total") == {"v1": 54, "v2": 6}
    assert more("kvgate_backend_first_token_seconds_count") == {"v1": 18, "v2": 2}
    tokens = more("kvgate_backend_tokens_total", kind="prompt")
    cached = more("kvgate_backend_tokens_total", kind="cached")
    assert tokens["v1"] > cached["v1"] > 0
    assert tokens["v2"] > 0


def counted(pages: list[httpx.Response], name: str, **labels: str) -> Counter[str]:
    """The sum over gateways, by backend of the model."""
    found: Counter[str] = Counter()
    for family in (each for page in pages for each in text_string_to_metric_families(page.text)):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                assert sample.labels["model"] == "chat"
                found[sample.labels["backend"]] += int(sample.value)
    return found


# The last one: it leaves open breakers.
async def test_no_death_of_a_version_leaves_the_model_without_service(stage: Stage, http: httpx.AsyncClient) -> None:
    for name in ("weight-a", "weight-b"):
        stage.servers[name].kill()
    answers = await asyncio.gather(
        *(ask(http, stage.urls[at % GATEWAYS], prose(f"after {at}", 40), model="chat") for at in range(40))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-kvgate-replica"] for answer in answers} == {"weight-c"}
    await eventually(lambda: _says(http, stage.urls[0], "backends_without_replicas", {"chat": ["v1"]}))
