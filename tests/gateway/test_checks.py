"""When a replica counts as dead, by its health checks over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web

from coordinator.store import Store, StoreSettings
from gateway.checks import Checks
from gateway.fleet import Fleet
from gateway.limit_settings import HealthSettings, TimeoutSettings
from gateway.settings import ReplicaSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream
from tests.polling import eventually
from tests.web_server import serving

FAILURES = 3

Health = Callable[[web.Request], Awaitable[web.Response]]


async def list_models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


@asynccontextmanager
async def checked(health: HealthSettings, **replicas: Health) -> AsyncIterator[Fleet]:
    """Replicas that answer /health so, and are asked for it by a gateway without a store."""
    store, upstream, tasks = (
        Store(StoreSettings("redis://127.0.0.1:1"), "g0"),
        Upstream(TimeoutSettings(), None),
        Tasks(),
    )
    fleet, listed = Fleet([], store, upstream), []
    async with AsyncExitStack() as stack:
        for name, answer in replicas.items():
            application = web.Application()
            application.add_routes([web.get("/health", answer), web.get("/v1/models", list_models)])
            listed.append(ReplicaSettings(id=name, url=await stack.enter_async_context(serving(application))))
        fleet.use(listed)
        tasks.spawn(Checks(fleet, health, store, upstream).run(), "checks")
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
