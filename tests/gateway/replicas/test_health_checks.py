"""When health checks over real HTTP declare a replica dead."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio as redis
from aiohttp import web

from coordinator.engine.facts import parse_models
from coordinator.keys import PoolKeys
from coordinator.pool.replicas import Replicas
from coordinator.registry import ReplicaRecord
from coordinator.store import Store, StoreOptions
from gateway.replicas import health_checks
from gateway.replicas.fleet import Fleet
from gateway.replicas.health_checks import FAILURES, HealthChecks
from gateway.replicas.told_role import ToldRole
from gateway.settings.base import ROLE_LABEL
from gateway.settings.gateway_settings import ReplicaSettings
from gateway.settings.limit_settings import HealthSettings
from gateway.tasks import Tasks
from gateway.upstream import Upstream
from tests.polling import eventually
from tests.redis_server import running_redis
from tests.web_server import serving

RECORDS = ("life-x ready 0 5 0 http://127.0.0.1:1", "life-" + "9" * 5000 + " ready 0 5 0 http://127.0.0.1:1")
Health = Callable[[web.Request], Awaitable[web.Response]]


weights: dict[str, str] = {}
"""The root and the start time of all replicas, if a test sets them."""


async def list_models(_request: web.Request) -> web.Response:
    card = {"id": "m", "object": "model"} | ({"root": weights["root"]} if weights else {})
    return web.json_response({"object": "list", "data": [card]})


async def tell_metrics(_request: web.Request) -> web.Response:
    """Metrics with a number that Python refuses to read."""
    if weights:
        return web.Response(text=f"process_start_time_seconds {weights['started']}\n")
    return web.Response(text='vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1.0\n' % ("9" * 5000))


pd_role: dict[str, Any] = {}
"""What all servers tell of their role, if a test sets it."""
asked_role: list[str] = []
"""Whom they told it, or that they have none."""


async def tell_role(request: web.Request) -> web.Response:
    asked_role.append(request.path)
    return web.json_response(pd_role) if pd_role else web.Response(status=404)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_checks, "INTERVAL_S", 0.01)


@asynccontextmanager
async def checked(
    redis_url: str = "redis://127.0.0.1:1", timeout_s: float = 1, **replicas: Health
) -> AsyncIterator[Fleet]:
    """Replicas that answer /health with these handlers, and a gateway that checks them. By default it has no store."""
    store, upstream, tasks = Store(StoreOptions(redis_url, 0.02), "g0"), Upstream(300, None), Tasks()
    fleet, listed = Fleet([], store, upstream), []
    async with AsyncExitStack() as stack:
        for name, answer in replicas.items():
            application = web.Application()
            told = [("/health", answer), ("/v1/models", list_models), ("/metrics", tell_metrics)]
            told.append(("/v1/pd_role", tell_role))
            application.add_routes([web.get(path, handler) for path, handler in told])
            listed.append(ReplicaSettings(id=name, url=await stack.enter_async_context(serving(application))))
        fleet.set_targets(listed)
        tasks.spawn(store.run(), "store")
        await store.first_attempt()
        checks = HealthChecks(fleet, HealthSettings(timeout_s=timeout_s), store, upstream)
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

    async with checked(r0=answer_health) as fleet:
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

    async with checked(timeout_s=3600, silent=say_nothing, failing=answer) as fleet:
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
            async with checked(server.url, r0=answer, r1=answer) as fleet:
                for name in ("r0", "stranger"):
                    await client.hset(PoolKeys("m").replicas, name, record)
                is_well = False
                await eventually(lambda: "alive" not in {fleet.describe()["r0"], fleet.describe()["r1"]})
                is_well = True
                await eventually(lambda: {fleet.describe()["r0"], fleet.describe()["r1"]} == {"alive"})


async def test_a_new_record_of_other_weights_stays_and_the_old_one_goes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another gateway may see the new weights first. And a record that comes back is another engine's."""
    called_dead, is_read = [], asyncio.Event()
    change_state = Replicas.change_state

    def noted(self: Replicas, replica: str, incarnation: str, before: str, state: str) -> None:
        called_dead.append((self._link.keys.pool, incarnation, state))
        change_state(self, replica, incarnation, before, state)

    async def answer(request: web.Request) -> web.Response:
        is_read.set()
        return web.Response()

    monkeypatch.setattr(Replicas, "change_state", noted)
    monkeypatch.setattr(sys.modules[__name__], "weights", {"root": "old", "started": "100.5"})
    old, new = PoolKeys("old").replicas, PoolKeys("new").replicas
    with running_redis() as server:
        async with (
            redis.Redis.from_url(server.url, decode_responses=True) as client,
            checked(server.url, r0=answer) as fleet,
        ):
            await eventually(lambda: client.hget(old, "r0"))
            before, life = str(await client.hget(old, "r0")), fleet.members["r0"].facts.started
            fleet._store.pool("new")
            await eventually(lambda: fleet._store.pool("new").is_worker and fleet._store.pool("old").is_worker)
            weights.update(root="new", started="200.5")
            await client.hset(new, "r0", before.replace(life, "200.5"))
            await eventually(lambda: _lacks(client, old, "r0"))
            assert called_dead == [("old", life, "dead")]
            await client.hset(old, "r0", before)
            await eventually(lambda: "r0" in fleet._store.pool("old").records)
            for _ in range(3):
                is_read.clear()
                await is_read.wait()
            assert await client.hget(old, "r0") == before


async def test_what_a_replica_has_shown_is_forgotten_when_it_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    monkeypatch.setattr(sys.modules[__name__], "weights", {"root": "m", "started": "100.5"})
    async with checked(r0=answer) as fleet:
        member = fleet.members["r0"]
        member.forces_usage = member.takes_media = True
        weights["started"] = "200.5"
        await eventually(lambda: (member.forces_usage, member.takes_media) == (None, False))


async def test_a_server_without_roles_is_asked_once_in_a_life_and_its_word_goes_before_the_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = sys.modules[__name__]
    monkeypatch.setattr(here, "weights", {"root": "m", "started": "100.5"})
    monkeypatch.setattr(here, "pd_role", {})
    monkeypatch.setattr(here, "asked_role", [])
    checks: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        checks.append(request.path)
        return web.Response()

    async with checked(r0=answer) as fleet:
        member = fleet.members["r0"]
        assert asked_role == [], "no replica has a role"
        fleet.set_targets([ReplicaSettings(id="r0", url=member.url, labels={ROLE_LABEL: "decode"})])
        await eventually(lambda: asked_role)
        before = len(checks)
        await eventually(lambda: len(checks) > before + 10)
        assert (len(asked_role), member.role) == (1, "decode")
        pd_role.update(role="prefill", epoch=0, phase="ready")
        weights["started"] = "200.5"
        for phase, role, shown in (("ready", "prefill", "prefill"), ("draining", "", "changing")):
            pd_role["phase"] = phase
            await eventually(lambda role=role: member.role == role)
            assert member.labels_in_force == {ROLE_LABEL: shown}
            assert fleet.backends("m")[0].replicas == {}, "it answers nobody"
        pd_role.update(role="decode", epoch=1, phase="ready")
        await eventually(lambda: member.is_decode_only)
        pd_role.clear()
        await eventually(lambda: member.told_role is None)
        assert (member.role, [*fleet.backends("m")[0].replicas]) == ("decode", ["r0"])


async def test_every_gateway_checks_a_server_that_tells_its_role_in_each_round() -> None:
    """Of other replicas, only the pool's worker does."""
    record = ReplicaRecord("r0", "life-1", "ready", 0, 0, "http://r0")
    pool: Any = SimpleNamespace(is_worker=False, records={"r0": record})
    store: Any = SimpleNamespace(is_connected=lambda _: True, pool=lambda _: pool)
    fleet = Fleet([ReplicaSettings(id="r0", url="http://r0")], store, Upstream(300, None))
    checks, member = HealthChecks(fleet, HealthSettings(), store, Upstream(300, None)), fleet.members["r0"]
    member.cards, member.alive, checks._round = parse_models({"data": [{"id": "m"}]}), True, 1
    assert not checks._is_due(member)
    member.told_role = ToldRole("decode", 0, True)
    assert checks._is_due(member)


async def _lacks(client: redis.Redis, key: str, replica: str) -> bool:
    return not await client.hexists(key, replica)


def test_a_replica_is_read_again_at_once_only_if_its_last_check_is_not_new() -> None:
    """Otherwise requests that it refuses would have all replicas checked all the time."""
    fleet = Fleet(
        [ReplicaSettings(id="r0", url="http://r0")],
        Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0"),
        Upstream(300, None),
    )
    fleet.changed.clear()
    fleet.members["r0"].checked_s = time.monotonic()
    fleet.read_again("r0")
    assert (fleet.members["r0"].reads_again, fleet.changed.is_set()) == (True, False)


async def test_other_labels_make_no_other_replica_of_it() -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.Response()

    async with checked(r0=answer) as fleet:
        member = fleet.members["r0"]
        assert member.labels == {}
        fleet.set_targets([ReplicaSettings(id="r0", url=member.url, labels={"version": "v2"})])
        assert (fleet.members["r0"] is member, member.labels, member.alive) == (True, {"version": "v2"}, True)
