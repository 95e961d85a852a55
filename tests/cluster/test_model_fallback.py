"""Another model answers when the one that a client asked for cannot; four gateways, three replicas.

The tests share them. Each test finds them as the tests before have left them, so those that break more come later."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio

from bench.cluster import Cluster, SimReplica
from tests.api.stage import PATIENT_REDIS
from tests.cluster.clients import CHAT, ask, chat, held_stream, prose
from tests.cluster.gateways import another_gateway, configured_like
from tests.cluster.servers import another_server
from tests.polling import eventually

LARGE, SMALL = "kvgate/large", "kvgate/small"
GATEWAYS = 4
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


class Stage(NamedTuple):
    urls: list[str]
    servers: dict[str, SimReplica]
    settings: dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Two replicas of a large model, and one of a small one, which may answer in its place requests without tools."""
    folder = tmp_path_factory.mktemp("fallback")
    async with AsyncExitStack() as stack:
        http, servers = await stack.enter_async_context(httpx.AsyncClient()), {}
        for name, root in (("a", LARGE), ("b", LARGE), ("c", SMALL)):
            server = another_server(http, folder, "--model", root, "--served-name", root, "--speed", "20")
            servers[name] = await stack.enter_async_context(server)
        models = [
            {"name": "chat", "backends": [{"match": {"root": LARGE}}], "fallback": [{"model": SMALL, "tools": False}]},
            {"name": "strict", "backends": [{"match": {"root": LARGE}}]},
        ]
        settings: dict[str, Any] = {
            "replicas": [{"id": f"fallback-{name}", "url": server.url} for name, server in servers.items()],
            "models": models,
            "health": {"timeout_s": 2},
            "redis": configured_like(cluster, "any")["redis"] | PATIENT_REDIS,
        }
        gateways = [
            await stack.enter_async_context(another_gateway(cluster, f"fallback-{at}", **settings))
            for at in range(GATEWAYS)
        ]
        urls = [gateway.url for gateway in gateways]
        for url in urls:
            await eventually(lambda url=url: _ready(http, url, 3))
        yield Stage(urls, servers, settings)


async def _ready(http: httpx.AsyncClient, url: str, count: int) -> bool:
    return len((await http.get(f"{url}/ready")).json()["replicas"]) == count


async def own_replicas_answer(stage: Stage, http: httpx.AsyncClient, status: int) -> None:
    """From now on, the replicas of the large model answer all requests with this status."""
    fault = {"mode": "none"} if status == 200 else {"mode": "error", "status": status, "count": -1}
    for name in ("a", "b"):
        assert (await http.post(f"{stage.servers[name].url}/sim/fail", json=fault)).status_code == 200


async def test_requests_go_to_their_own_model_while_it_can_answer(stage: Stage, http: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(
        *(ask(http, stage.urls[at % GATEWAYS], prose(f"own {at}", 40), model="chat") for at in range(20))
    )
    assert {answer.headers["x-kvgate-model"] for answer in answers} == {LARGE}
    assert {answer.json()["model"] for answer in answers} == {"chat"}


async def test_another_model_answers_when_there_is_no_room_in_time(
    cluster: Cluster, stage: Stage, http: httpx.AsyncClient
) -> None:
    short = {"policy": {"max_active_requests": 1}, "queue": {"wait_s": 0.5}}
    async with (
        another_gateway(cluster, "fallback-short", **stage.settings, **short) as gateway,
        held_stream(http, gateway.url, "one", model="strict", max_tokens=2000),
        held_stream(http, gateway.url, "two", model="strict", max_tokens=2000),
    ):
        answer = await ask(http, gateway.url, "no room for it", model="chat")
        assert (answer.status_code, answer.headers["x-kvgate-model"]) == (200, SMALL)
        refused = await ask(http, gateway.url, "nor for this", model="strict")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "deadline_unreachable")


async def test_another_model_answers_when_every_replica_of_its_own_fails(stage: Stage, http: httpx.AsyncClient) -> None:
    await own_replicas_answer(stage, http, 500)
    answer = await ask(http, stage.urls[0], prose("it fails", 40), model="chat")
    assert (answer.status_code, answer.headers["x-kvgate-model"]) == (200, SMALL)
    await own_replicas_answer(stage, http, 200)
    metrics = (await http.get(f"{stage.urls[0]}/metrics")).text
    assert 'kvgate_fallbacks_total{why="failed"} 1.0' in metrics


async def test_a_spent_retry_budget_keeps_nobody_from_the_other_model_while_no_own_replica_is_sound(
    stage: Stage, http: httpx.AsyncClient
) -> None:
    async def models(count: int, what: str) -> Counter[str]:
        asked = (ask(http, stage.urls[0], prose(f"{what} {at}", 40), model="chat") for at in range(count))
        answers = [await each for each in asked]
        return Counter(each.headers.get("x-kvgate-model", "") for each in answers if each.status_code == 200)

    assert await models(20, "well") == {LARGE: 20}
    await own_replicas_answer(stage, http, 500)
    await models(40, "the budget is spent")
    assert await models(40, "then") == {SMALL: 40}


async def test_another_model_answers_while_none_of_its_own_replicas_is_there_and_says_so(
    stage: Stage, http: httpx.AsyncClient
) -> None:
    stage.servers["a"].kill()
    stage.servers["b"].kill()
    # Some come before gateways know of it: their attempts fail, and then the other model answers.
    answers = await asyncio.gather(
        *(ask(http, stage.urls[at % GATEWAYS], prose(f"gone {at}", 40), model="chat") for at in range(20))
    )
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-kvgate-model"] for answer in answers} == {SMALL}
    assert {answer.json()["model"] for answer in answers} == {"chat"}

    for url in stage.urls:
        await eventually(lambda url=url: _ready(http, url, 1))
    prompt = prose("the same beginning", 600)
    matched = [
        (await ask(http, stage.urls[at], f"{prompt} {at}", model="chat")).headers["x-kvgate-matched-tokens"]
        for at in range(3)
    ]
    assert int(matched[2]) > 0, "its prompts are placed by their prefixes there"

    asked = chat("where would it go?", model="chat")
    explained = (await http.post(f"{stage.urls[0]}/v1/route/explain", json=asked)).json()
    assert (explained["served_model"], explained["choice"]["replica"]) == (SMALL, "fallback-c")
    with_tools = await http.post(stage.urls[0] + CHAT, json=chat("with tools", model="chat", tools=TOOLS))
    assert (with_tools.status_code, with_tools.json()["error"]["code"]) == (503, "no_replica")
    strict = await ask(http, stage.urls[0], "a model without fallback", model="strict")
    assert strict.status_code == 503
