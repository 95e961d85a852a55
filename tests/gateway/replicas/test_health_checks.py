"""When health checks over real HTTP declare a replica dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import redis.asyncio as redis
from aiohttp import web

from coordinator.keys import PoolKeys
from coordinator.store import Store, StoreOptions
from gateway.replicas.fleet import Fleet
from gateway.replicas.health_checks import HealthChecks
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.settings.limit_settings import HealthSettings, TimeoutSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream
from tests.polling import eventually
from tests.redis_server import running_redis
from tests.web_server import serving

FAILURES = 3

RECORDS = ("life-x ready 0 5 0 http://127.0.0.1:1", "life-" + "9" * 5000 + " ready 0 5 0 http://127.0.0.1:1")
Health = Callable[[web.Request], Awaitable[web.Response]]


async def list_models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


async def tell_metrics(_request: web.Request) -> web.Response:
    """Metrics with a number that Python refuses to read."""
    return web.Response(text='vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1.0\n' % ("9" * 5000))


@asynccontextmanager
async def checked(
    health: HealthSettings, redis_url: str = "redis://127.0.0.1:1", **replicas: Health
) -> AsyncIterator[Fleet]:
    """Replicas that answer /health with these handlers, and a gateway that checks them. By default it has no store."""
    store, upstream, tasks = Store(StoreOptions(redis_url), "g0"), Upstream(TimeoutSettings(), None), Tasks()
    fleet, listed = Fleet([], store, upstream), []
    async with AsyncExitStack() as stack:
        for name, answer in replicas.items():
            application = web.Application()
            told = (("/health", answer), ("/v1/models", list_models), ("/metrics", tell_metrics))
            application.add_routes([web.get(path, handler) for path, handler in told])
            listed.append(ReplicaSettings(id=name, url=await stack.enter_async_context(serving(application))))
        fleet.set_targets(listed)
        tasks.spawn(store.run(), "store")
        await store.first_attempt()
        checks = HealthChecks(fleet, health, store, upstream)
        tasks.spawn(checks.run(), "checks")
        await checks.first_round()
        try:
            await eventually(lambda: fleet.describe() == dict.fromkeys(replicas, "alive"))
            yield fleet
        finally:
            await tasks.close()
            await upstream.close()


async def test_a_replica_is_dead_with_the_last_of_so_many_failed_checks_and_not_before() -> None:
    is_well, seen_at_failures = True, list[str]()

    async def answer_health(_request: web.Request) -> web.Response:
        if is_well:
            return web.Response()
        seen_at_failures.append(fleet.describe()["r0"])
        return web.Response(status=503)

    async with checked(HealthSettings(interval_s=0.01, failures=FAILURES), r0=answer_health) as fleet:
        is_well = False
        await eventually(lambda: len(seen_at_failures) > FAILURES + 1)
        assert seen_at_failures[:FAILURES] == ["alive"] * FAILURES
        assert seen_at_failures[FAILURES] == "unhealthy: /health answered 503"
        is_well = True
        await eventually(lambda: fleet.describe() == {"r0": "alive"})


async def test_a_replica_that_does_not_answer_holds_up_no_check_of_another() -> None:
    is_well, is_asked = True, asyncio.Event()

    async def say_nothing(_request: web.Request) -> web.Response:
        if not is_well:
            is_asked.set()
            await asyncio.get_running_loop().create_future()
        return web.Response()

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=200 if is_well else 503)

    async with checked(HealthSettings(interval_s=0.01, timeout_s=3600), silent=say_nothing, failing=answer) as fleet:
        is_well = False
        await is_asked.wait()
        await eventually(lambda: fleet.describe()["failing"] != "alive")
        assert fleet.describe()["silent"] == "alive"


@pytest.mark.parametrize("record", RECORDS, ids=["no-number", "a-long-number"])
async def test_a_record_whose_life_cannot_be_read_stops_no_check(record: str) -> None:
    """The record of an engine that does not report its start time."""
    is_well = True

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=200 if is_well else 503)

    with running_redis() as server:
        async with redis.Redis.from_url(server.url) as client:
            await client.hset(PoolKeys("m").replicas, mapping={"r0": record, "stranger": record})
            async with checked(HealthSettings(interval_s=0.01), server.url, r0=answer, r1=answer) as fleet:
                for name in ("r0", "stranger"):
                    await client.hset(PoolKeys("m").replicas, name, record)
                is_well = False
                await eventually(lambda: "alive" not in {fleet.describe()["r0"], fleet.describe()["r1"]})
                is_well = True
                await eventually(lambda: {fleet.describe()["r0"], fleet.describe()["r1"]} == {"alive"})
