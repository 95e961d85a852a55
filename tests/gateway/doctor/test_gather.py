"""The doctor asks servers that hang, lie or require keys. Each server costs at most one timeout, and a missing answer
stays unknown."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from gateway.doctor.ask import ask_gateway, ask_lmcache, ask_replica
from gateway.doctor.evidence import Evidence, ReplicaEvidence, Unknown
from gateway.doctor.gather import Targets, gather
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.simulator.server import serving
from gateway.simulator.settings import SimSettings
from gateway.upstream import Upstream
from tests import web_server

NOWHERE = "redis://127.0.0.1:1"


@asynccontextmanager
async def answering(answers: dict[str, Any], seen: list[web.Request] | None = None) -> AsyncIterator[str]:
    """A server that answers each path with this document, text or status."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append(request)
        said = answers.get(request.path, 404)
        if isinstance(said, int):
            return web.Response(status=said)
        if isinstance(said, str):
            return web.Response(text=said)
        return web.json_response(said)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with web_server.serving(app) as url:
        yield url


async def asked(url: str, with_key: bool = False, timeout_s: float = 2.0) -> ReplicaEvidence:
    upstream = Upstream(300, "replica-key")
    try:
        return await ask_replica(upstream, ReplicaEvidence("r0", url), with_key, timeout_s)
    finally:
        await upstream.close()


async def gathered(*urls: str, **targets: Any) -> Evidence:
    replicas = tuple(ReplicaSettings(id=f"r{n}", url=url) for n, url in enumerate(urls))
    return await gather(Targets(NOWHERE, replicas=replicas, **targets))


async def test_a_replica_tells_its_pool_version_settings_and_endpoints() -> None:
    async with serving(SimSettings(vllm_version="0.33.1", block_size=32, model="org/m")) as port:
        replica = await asked(f"http://127.0.0.1:{port}")
    assert (replica.problem, replica.answers, replica.version) == ("", True, "0.33.1")
    assert replica.pool.startswith("org-m-")
    assert isinstance(replica.cache, dict)
    assert (replica.cache["block_size"], replica.cache["enable_prefix_caching"]) == ("32", "True")
    assert isinstance(replica.endpoints, tuple)
    assert [endpoint.rpartition(":")[0] for endpoint in replica.endpoints] == ["tcp://127.0.0.1"] * 2
    assert replica.open_endpoints == {}


async def test_one_without_events_says_so() -> None:
    async with serving(SimSettings(events=False)) as port:
        assert (await asked(f"http://127.0.0.1:{port}")).endpoints == ()


@pytest.mark.parametrize(
    "answers",
    [
        {"/health": {}},
        {"/health": {}, "/version": [], "/v1/models": 3, "/metrics": "none", "/kv_event_sources": [1]},
        {"/health": {}, "/version": "{", "/v1/models": "<html>", "/kv_event_sources": {"0": 1}},
        {"/health": {}, "/version": 401, "/v1/models": 401, "/metrics": 401, "/kv_event_sources": 500},
    ],
    ids=["nothing", "lies", "no json", "keys wanted"],
)
async def test_what_a_server_does_not_tell_is_not_known(answers: dict[str, Any]) -> None:
    async with answering(answers) as url:
        replica = await asked(url)
    assert replica.answers
    assert isinstance(replica.version, Unknown)
    assert isinstance(replica.cache, Unknown)
    assert isinstance(replica.endpoints, Unknown)


async def test_the_replicas_key_goes_to_configured_replicas_alone() -> None:
    for with_key in (True, False):
        seen: list[web.Request] = []
        async with answering({"/health": {}}, seen) as url:
            await asked(url, with_key=with_key)
        assert len(seen) == 5
        assert {request.headers.get("authorization") for request in seen} == {
            "Bearer replica-key" if with_key else None
        }


async def test_hung_servers_delay_the_doctor_by_one_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:  # the kernel accepts connections, and nobody reads them
        url = f"http://127.0.0.1:{hung.getsockname()[1]}"
        async with serving(SimSettings()) as port:
            began = time.monotonic()
            evidence = await gathered(
                url, url, url, f"http://127.0.0.1:{port}", gateways=(url, url), lmcache=(url,), timeout_s=2.0
            )
            took_s = time.monotonic() - began
    assert took_s < 3.9
    assert [replica.problem for replica in evidence.replicas()] == ["", *["no answer within 2 s"] * 3]
    assert all("within 2 s" in gateway.problem for gateway in evidence.gateways)
    assert "within 2 s" in evidence.lmcache[0].problem


async def test_a_redis_that_hangs_costs_no_more_than_its_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        targets = Targets(f"redis://127.0.0.1:{hung.getsockname()[1]}", timeout_s=0.5)
        async with asyncio.timeout(5):
            evidence = await gather(targets)
    assert isinstance(evidence.redis, Unknown)


@pytest.mark.parametrize("said", [404, "<html>", [], {"ready": True}, {"gateway": 1, "ready": True, "reasons": None}])
async def test_what_is_no_gateway_is_a_problem_and_not_an_error(said: Any) -> None:
    async with answering({"/ready": said, "/version": {"version": "1"}}) as url, httpx.AsyncClient() as http:
        assert (await ask_gateway(http, url, 2.0)).problem


async def test_a_gateway_names_the_conditions_that_it_warns_of() -> None:
    ready = {"gateway": "g", "ready": True, "reasons": [], "replicas": [], "exact": []}
    warned = {
        "store_conditions": ["redis_older_than_7"],
        "store_warnings": ["it is old"],
        "not_ready": {"r7": "no answer"},
        "labels": {"r0": {"kvgate.io/role": "decode", "version": "v2"}, "r1": {"version": "v2"}},
    }
    about = {"version": "1"}
    async with answering({"/ready": ready | warned, "/version": about}) as url, httpx.AsyncClient() as http:
        gateway = await ask_gateway(http, url, 2.0)
    assert gateway.problem == ""
    assert gateway.store_warnings == {"redis_older_than_7": "it is old"}
    assert gateway.not_ready == {"r7": "no answer"}
    assert gateway.roles == {"r0": "decode"}


async def test_an_lmcache_server_tells_how_it_cuts_and_names_chunks() -> None:
    status = {"is_healthy": True, "chunk_size": 256, "hash_algorithm": "blake3", "storage_manager": {}}
    async with answering({"/status": status}) as url, httpx.AsyncClient() as http:
        server = await ask_lmcache(http, url, 2.0)
    assert (server.problem, server.chunk_tokens, server.hash_algorithm) == ("", "256", "blake3")


@pytest.mark.parametrize("said", [404, 503, [], {"is_healthy": False}, {"is_healthy": True}])
async def test_what_is_no_healthy_lmcache_server_is_a_problem(said: Any) -> None:
    async with answering({"/status": said}) as url, httpx.AsyncClient() as http:
        assert (await ask_lmcache(http, url, 2.0)).problem
