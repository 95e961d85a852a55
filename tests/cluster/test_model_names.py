"""Models of the configuration: clients use one name for replicas that know the model by two others."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import httpx
import orjson
import pytest
import pytest_asyncio

from bench.cluster import Cluster, SimReplica
from tests.cluster.clients import CHAT, chat, prose
from tests.cluster.gateways import another_gateway
from tests.cluster.servers import another_server
from tests.polling import eventually

ALIAS = "gpt-4o-mini"
V1, V2 = "chat", "org/chat-v2"
MODEL = {
    "name": "chat",
    "aliases": [ALIAS],
    "backends": [{"name": "v1", "match": {"root": "kvgate/1"}}, {"name": "v2", "match": {"model": V2}}],
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {},
    "/v1/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
}


class Stage(NamedTuple):
    url: str
    servers: list[SimReplica]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("names")
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient())
        named = (("--model", "kvgate/1", "--served-name", V1), ("--model", "kvgate/2", "--served-name", V2))
        servers = [await stack.enter_async_context(another_server(http, folder, *names)) for names in named]
        replicas = [{"id": f"name-{at}", "url": server.url} for at, server in enumerate(servers)]
        settings = {"replicas": replicas, "models": [MODEL], "health": {"timeout_s": 2}}
        gateway = await stack.enter_async_context(another_gateway(cluster, "names", **settings))
        await eventually(lambda: _knows_both(http, gateway.url))
        yield Stage(gateway.url, servers)


async def _knows_both(http: httpx.AsyncClient, url: str) -> bool:
    return len((await http.get(f"{url}/ready")).json()["replicas"]) == 2


def prompt_of(path: str, text: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": text}
    return {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}


def names_in(answer: httpx.Response) -> set[str]:
    """The models that an answer, or any of its events, names."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return {answer.json()["model"]}
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {"))
    documents = [orjson.loads(line) for line in lines]
    inner = [each.get("response") or each.get("message") or each for each in documents]
    return {each["model"] for each in inner if "model" in each}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_clients_get_back_the_name_that_they_used(
    stage: Stage, http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    served: Counter[str] = Counter()
    for at in range(4):
        body = {"model": ALIAS, "stream": stream, **BODIES[path], **prompt_of(path, prose(f"{path} {stream} {at}", 40))}
        answer = await http.post(stage.url + path, json=body)
        assert answer.status_code == 200, answer.text
        assert names_in(answer) == {ALIAS}
        served[answer.headers["x-kvgate-model"]] += 1
    assert served == {V1: 2, V2: 2}, "a replica refuses any name but its own"


async def test_a_response_is_continued_under_the_name_that_its_replica_knows(
    stage: Stage, http: httpx.AsyncClient
) -> None:
    url, seen = f"{stage.url}/v1/responses", set()
    for at in range(4):
        first = await http.post(url, json={"model": ALIAS, "input": prose(f"response {at}", 40)})
        more = {"model": ALIAS, "input": "and?", "previous_response_id": first.json()["id"]}
        second = await http.post(url, json=more)
        assert (second.status_code, second.json()["model"]) == (200, ALIAS), second.text
        assert second.headers["x-kvgate-model"] == first.headers["x-kvgate-model"]
        seen.add(second.headers["x-kvgate-model"])
    assert seen == {V1, V2}


async def test_a_retry_asks_under_the_other_name(stage: Stage, http: httpx.AsyncClient) -> None:
    """The last test: its server fails from now on."""
    await http.post(f"{stage.servers[0].url}/sim/fail", json={"mode": "error", "status": 500, "count": -1})
    for at in range(4):
        answer = await http.post(stage.url + CHAT, json=chat(prose(f"retry {at}", 40), model="chat"))
        assert (answer.status_code, answer.headers["x-kvgate-model"], names_in(answer)) == (200, V2, {"chat"})
