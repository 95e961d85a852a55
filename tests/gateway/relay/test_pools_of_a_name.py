"""Requests whose model gets and loses pools while they wait, and the limits of their tenants. Most have no store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from coordinator import breaker
from gateway.app import Gateway
from gateway.settings.gateway_settings import ReplicaSettings
from tests.gateway.scripted import ASKED, CHAT, ScriptedReplica, gateway_before, whole
from tests.polling import eventually
from tests.redis_server import running_redis

FINE = whole(b'{"object": "chat.completion"}', "connection: close")


@pytest.fixture
async def old() -> AsyncIterator[ScriptedReplica]:
    async with serving("weights-1") as replica:
        yield replica


@pytest.fixture
async def new() -> AsyncIterator[ScriptedReplica]:
    async with serving("weights-2") as replica:
        replica.says(FINE)
        yield replica


class serving:
    """A replica with these weights, which listens."""

    def __init__(self, root: str) -> None:
        self._replica, self._stack = ScriptedReplica(), AsyncExitStack()
        self._replica.cards = [{"id": "m", "root": root}]

    async def __aenter__(self) -> ScriptedReplica:
        await self._stack.enter_async_context(self._replica.running())
        return self._replica

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


def listed(**replicas: ScriptedReplica) -> list[ReplicaSettings]:
    return [ReplicaSettings(id=name, url=replica.url) for name, replica in replicas.items()]


def ask(http: httpx.AsyncClient, text: str) -> asyncio.Task[httpx.Response]:
    body = {**ASKED, "messages": [{"role": "user", "content": f"{text} " * 900}]}
    return asyncio.ensure_future(http.post(CHAT, json=body))


async def until_ready(gateway: Gateway, *names: str) -> None:
    await eventually(lambda: set(gateway.fleet.ready_replicas()) == set(names))


async def test_a_request_is_tried_again_on_weights_that_came_after_it_was_sent(
    old: ScriptedReplica, new: ScriptedReplica
) -> None:
    breaks = asyncio.Event()
    old.says(breaks)
    async with gateway_before(old) as (gateway, url), httpx.AsyncClient(base_url=url) as http:
        asked = ask(http, "early")
        await eventually(lambda: old.asked)
        gateway.fleet.set_targets(listed(r0=old, r1=new))
        await until_ready(gateway, "r0", "r1")
        breaks.set()
        answer = await asked
        assert (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, "r1")


async def test_a_pool_whose_replicas_have_just_become_ready_is_asked_before_a_request_fails(
    old: ScriptedReplica, new: ScriptedReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat tells the gateway up to half a second late that they are ready."""
    old.says(b"")
    replicas = [each.model_dump() for each in listed(r0=old, r1=new)]
    before = gateway_before(old, replicas=replicas)
    async with before as (gateway, url), httpx.AsyncClient(base_url=url) as http:
        await until_ready(gateway, "r0", "r1")
        monkeypatch.setattr(gateway.fleet, "is_ready", lambda name: name == "r0")
        answer = await ask(http, "early")
        assert (answer.status_code, answer.headers.get("x-kvgate-replica"), old.asked > 0) == (200, "r1", True)


async def test_requests_that_wait_for_replicas_that_are_not_listed_any_more_go_to_another_pool(
    old: ScriptedReplica, new: ScriptedReplica
) -> None:
    ends = asyncio.Event()
    for each in (old, new):
        each.says(ends, FINE)
    settings = {
        "replicas": [each.model_dump() for each in listed(r0=old, r1=new)],
        "policy": {"max_active_requests": 1},
    }
    async with gateway_before(old, **settings) as (gateway, url), httpx.AsyncClient(base_url=url, timeout=30) as http:
        await until_ready(gateway, "r0", "r1")
        asked = [ask(http, f"{n}") for n in range(10)]
        waiting = [gateway.store.pool(name).load for name in ("weights-1", "weights-2")]
        await eventually(lambda: sum(load.waiting for load in waiting) == 8 and all(load.waiting for load in waiting))
        gateway.fleet.set_targets(listed(r1=new))
        await eventually(lambda: not waiting[0].waiting)
        ends.set()
        answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}
        assert (old.asked, new.asked) == (1, 9)


async def test_a_prompt_that_seems_too_long_goes_to_a_shorter_replica_if_no_longer_one_is_ready(
    old: ScriptedReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many tokens a prompt has is only estimated, and the engine cuts the answer."""
    monkeypatch.setattr("gateway.replicas.health_checks.INTERVAL_S", 0.05)
    old.cards = [{"id": "m", "max_model_len": 512}]
    old.says(FINE)
    async with AsyncExitStack() as stack:
        dies = serving("m")
        long = await dies.__aenter__()
        long.cards = [{"id": "m", "max_model_len": 65_536}]
        replicas = [each.model_dump() for each in listed(short=old, long=long)]
        gateway, url = await stack.enter_async_context(gateway_before(old, replicas=replicas))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        await until_ready(gateway, "short", "long")
        assert (await ask(http, "many tokens")).headers["x-kvgate-replica"] == "long"
        await dies.__aexit__()

        async def is_served() -> bool:
            answer = await ask(http, "many tokens")
            return (answer.status_code, answer.headers["x-kvgate-replica"]) == (200, "short")

        await eventually(is_served)


async def test_a_request_that_moves_to_another_pool_counts_once_in_its_tenants_minute(
    old: ScriptedReplica, new: ScriptedReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker, "FAILURES", 100)
    old.says(b"")
    settings: dict[str, Any] = {
        "replicas": [each.model_dump() for each in listed(r0=old, r1=new)],
        "tenants": [{"name": "-", "limits": {"requests_per_min": 12}}],
    }
    with running_redis() as server:
        before = gateway_before(old, redis={"url": server.url}, **settings)
        async with before as (gateway, url), httpx.AsyncClient(base_url=url) as http:
            await until_ready(gateway, "r0", "r1")
            statuses = [(await ask(http, f"{n}")).status_code for n in range(12)]
            assert (statuses, old.asked > 0) == ([200] * 12, True)
