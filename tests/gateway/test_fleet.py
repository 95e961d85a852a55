"""When a replica counts as dead, by its health checks over real HTTP."""

from __future__ import annotations

from aiohttp import web

from coordinator.store import Store, StoreSettings
from gateway.fleet import Fleet
from gateway.limit_settings import HealthSettings, TimeoutSettings
from gateway.settings import ReplicaSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream
from tests.polling import eventually
from tests.web_server import serving

FAILURES = 3


async def test_a_replica_is_dead_with_the_last_of_so_many_failed_checks_and_not_before() -> None:
    store = Store(StoreSettings("redis://127.0.0.1:1"), "g0")
    upstream = Upstream(TimeoutSettings(), None)
    health = HealthSettings(interval_s=0.01, failures=FAILURES)
    fleet = Fleet([], health, store, upstream)
    is_well, seen_at_failures = True, list[str]()

    async def answer_health(_request: web.Request) -> web.Response:
        if is_well:
            return web.Response()
        seen_at_failures.append(fleet.describe()["r0"])
        return web.Response(status=503)

    async def list_models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    application = web.Application()
    application.add_routes([web.get("/health", answer_health), web.get("/v1/models", list_models)])
    tasks = Tasks()
    async with serving(application) as url:
        fleet.use([ReplicaSettings(id="r0", url=url)])
        tasks.spawn(fleet.run(), "fleet")
        try:
            await eventually(lambda: fleet.describe() == {"r0": "alive"})
            is_well = False
            await eventually(lambda: len(seen_at_failures) > FAILURES + 1)
            assert seen_at_failures[:FAILURES] == ["alive"] * FAILURES
            assert seen_at_failures[FAILURES] == "unhealthy: /health answered 503"
            is_well = True
            await eventually(lambda: fleet.describe() == {"r0": "alive"})
        finally:
            await tasks.close()
            await upstream.close()
