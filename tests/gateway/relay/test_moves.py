"""What waits for a replica whose id has another address by now: over real HTTP and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from aiohttp import web

from coordinator.store import Store, StoreOptions
from gateway.deadlines import Deadlines
from gateway.relay.moves import Moves, WaitingAttempt
from gateway.replicas.fleet import Fleet
from gateway.replicas.hangs import Hangs
from gateway.replicas.health_checks import Checks
from gateway.replicas.progress import Progress
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.settings.limit_settings import HealthSettings, TimeoutSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream
from tests.polling import eventually
from tests.redis_server import RedisServer, running_redis
from tests.web_server import serving

HEALTH = HealthSettings(interval_s=0.05, timeout_s=0.2)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


class Replica:
    """Answers while it is not frozen."""

    def __init__(self) -> None:
        self.asked_frozen = 0
        self.is_frozen = False
        self.application = web.Application()
        self.application.add_routes([web.get("/health", self._health), web.get("/v1/models", self._models)])

    async def _health(self, _request: web.Request) -> web.Response:
        if self.is_frozen:
            self.asked_frozen += 1
            await asyncio.get_running_loop().create_future()
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


async def test_what_waits_at_an_address_that_the_replica_has_left_stays_while_that_answers_and_goes_when_it_does_not(
    redis_server: RedisServer,
) -> None:
    old, other, tasks, upstream = Replica(), Replica(), Tasks(), Upstream(TimeoutSettings(), None)
    async with serving(old.application) as old_url, serving(other.application) as other_url:
        store = Store(StoreOptions(redis_server.url), "g0")
        tasks.spawn(store.run(), "store")
        await store.first_attempt()
        stays = ReplicaSettings(id="r1", url=other_url)
        fleet = Fleet([ReplicaSettings(id="r0", url=old_url), stays], store, upstream)
        checks, progress = Checks(fleet, HEALTH, store, upstream), Progress(fleet, store)
        moves = Moves(fleet, checks, store, progress, Hangs(HEALTH, store, upstream, progress))
        try:
            tasks.spawn(checks.run(), "checks")
            await checks.first_round()
            tasks.spawn(moves.run(), "moves")
            await eventually(lambda: fleet.is_ready("r0") and fleet.is_ready("r1"))
            waiting = tasks.spawn(wait_for_r0(moves), "a request")
            await eventually(lambda: "r0" in moves.waiting)
            member = fleet.members["r0"]
            fleet.use([ReplicaSettings(id="r0", url="http://127.0.0.1:1"), stays])
            before_s = member.answered_s
            await eventually(lambda: member.answered_s > before_s)
            assert not waiting.done()
            old.is_frozen = True
            assert (await waiting).moved == "dead"
            assert old.asked_frozen >= HEALTH.failures
            assert store.pool_names() == ["m"]
        finally:
            await tasks.close()
            await upstream.close()


async def wait_for_r0(moves: Moves) -> WaitingAttempt:
    task = asyncio.current_task()
    assert task is not None
    limit = Deadlines().within(None, task)
    try:
        with limit, moves.attempt("r0", ("r0", "r1"), [], limit) as waiting:
            await asyncio.get_running_loop().create_future()
    except TimeoutError:
        return waiting
    raise AssertionError("nothing answers it")
