"""What a replica answers, as its client gets it: every byte of the replica's is the test's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from gateway.app import Gateway
from tests.gateway.scripted import ScriptedReplica, chunk, gateway_before, head

CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
EVENTS = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
STREAM_HEADERS = ("content-type: text/event-stream", "transfer-encoding: chunked")


@dataclass
class Relayed:
    """A gateway in front of a scripted replica."""

    gateway: Gateway
    replica: ScriptedReplica
    http: httpx.AsyncClient

    async def stream(self, path: str = CHAT) -> httpx.Response:
        return await self.http.post(path, json={**ASKED, "stream": True})


@pytest.fixture
async def relayed() -> AsyncIterator[Relayed]:
    replica = ScriptedReplica()
    async with (
        replica.running(),
        gateway_before(replica) as (gateway, url),
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield Relayed(gateway, replica, http)


async def test_streams_say_that_no_proxy_may_collect_them(relayed: Relayed) -> None:
    relayed.replica.says(head(*STREAM_HEADERS), chunk(EVENTS), chunk(b""))
    headers = (await relayed.stream()).headers
    assert (headers.get_list("x-accel-buffering"), headers.get_list("cache-control")) == (["no"], ["no-cache"])


async def test_what_a_replica_says_of_caching_stays(relayed: Relayed) -> None:
    relayed.replica.says(head(*STREAM_HEADERS, "Cache-Control: no-store"), chunk(EVENTS), chunk(b""))
    headers = (await relayed.stream()).headers
    assert (headers.get_list("x-accel-buffering"), headers.get_list("cache-control")) == (["no"], ["no-store"])
