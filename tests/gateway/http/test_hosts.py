"""A web page whose host's name points at a gateway without API keys gets nothing from it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from gateway.http.hosts import Hosts
from tests.gateway.scripted import ASKED, CHAT, ScriptedReplica, gateway_before

KEYS = [{"name": "a", "sha256": "0" * 64, "tenant": "a"}]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "api.localhost",
        "127.0.0.1:8080",
        "10.0.0.7",
        "[::1]:8080",
        "[fe80::1]",
        "::1",
        "gateway",
        "gateway:80",
        "kvgate.team.svc",
        "kvgate.team.svc.cluster.local.",
        "LLM.example.com:8443",
    ],
)
def test_a_gateway_answers_to_its_own_names(host: str) -> None:
    assert Hosts(["llm.example.com"])._judge(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:18640",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example.",
        "a.llm.example.com",
        "0x7f.0.0.1",
        "svc.example",
        "[evil.example]",
    ],
)
def test_it_answers_to_no_other(host: str) -> None:
    assert not Hosts(["llm.example.com"])._judge(host)
    assert Hosts(["*"])._judge(host)


@pytest.mark.parametrize("path", ["/console", "/v1/queue", "/v1/models", "/metrics", "/ready", CHAT])
async def test_a_page_that_was_rebound_reaches_nothing(path: str) -> None:
    replica = ScriptedReplica()
    async with replica.running(), gateway_before(replica) as (_, url), httpx.AsyncClient(base_url=url) as client:
        for method, body in (("GET", None), ("POST", ASKED)):
            answer = await client.request(method, path, json=body, headers={"host": "evil.example:18640"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
            assert "security.hosts" in answer.json()["error"]["message"]
        assert replica.asked == 0


async def test_where_a_key_is_asked_for_any_name_will_do() -> None:
    replica = ScriptedReplica()
    security = {"api_keys": KEYS, "share_cache": True}
    async with (
        replica.running(),
        gateway_before(replica, security=security) as (_, url),
        httpx.AsyncClient(base_url=url) as client,
    ):
        answer = await client.get("/v1/models", headers={"host": "llm.example.com"})
        assert answer.json()["error"]["code"] == "missing_api_key"


async def test_a_request_without_a_host_is_no_browsers() -> None:
    replica = ScriptedReplica()
    async with replica.running(), gateway_before(replica) as (_, url):
        port = httpx.URL(url).port
        assert port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()
