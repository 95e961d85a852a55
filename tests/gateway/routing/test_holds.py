"""Requests are held while no replica is ready: not too many, and they go where replicas are then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.engine.facts import ModelCard
from coordinator.registry import ReplicaRecord
from coordinator.store import Store, StoreOptions
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.replicas.fleet import Fleet
from gateway.replicas.served import ServedModel
from gateway.request.job import Job
from gateway.request.keyring import Caller
from gateway.routing.holds import Holds
from gateway.routing.tenants import Tenants
from gateway.settings.gateway_settings import GatewaySettings, ReplicaSettings
from gateway.settings.model_settings import ModelSettings
from gateway.upstream import Upstream
from tests.gateway.routing.test_router import job


class Held:
    """A gateway that knows the model `sim` of pool `m`, and another one of pool `n`, and no replica of either."""

    def __init__(self, **queue: Any) -> None:
        settings = GatewaySettings.model_validate(
            {
                "queue": {"hold_s": 60, **queue},
                "tenants": [{"name": "urgent", "priority": "realtime"}, {"name": "other"}],
            }
        )
        self.metrics = Metrics()
        self.store = Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0")
        self.fleet = Fleet([], self.store, Upstream(settings.timeouts.idle_s, None))
        self.fleet.known |= {"sim": ServedModel("m", "m", None, {}), "sim of n": ServedModel("n", "n", None, {})}
        self.holds = Holds(settings.queue, self.fleet, self.store, Tenants(settings), self.metrics)

    def job(self, tenant: str = "other", pool: str = "m") -> Job:
        asked = job(b"x")._replace(caller=Caller(tenant, False), model="sim" if pool == "m" else f"sim of {pool}")
        asked.route.served = ServedModel(pool, pool, None, {"r0": "http://old"})
        return asked

    async def held(self, asked: Job) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self.holds.until_ready(asked))
        await asyncio.sleep(0)
        return task

    def has_replica(self, url: str) -> None:
        """A replica is found and ready."""
        self.fleet.set_targets([ReplicaSettings(id="r0", url=url)])
        member = self.fleet.members["r0"]
        member.pool, member.alive, member.cards = "m", True, [ModelCard("sim", "m", None, {})]
        self.store.pool("m").register(ReplicaRecord("r0", "1", "ready", 0, 0, url))
        self.fleet.update_served()
        self.holds.wake()


async def test_no_more_are_held_than_may_wait_and_lower_bands_and_other_pools_take_no_place_away() -> None:
    gateway = Held(max_waiting=2, max_waiting_per_tenant=2)
    tasks = [await gateway.held(gateway.job(tenant)) for tenant in ("other", "third")]
    with pytest.raises(ApiError) as full:
        await gateway.holds.until_ready(gateway.job("fourth"))
    assert full.value.code == "queue_full"
    assert gateway.metrics.registry.get_sample_value("kvgate_queue_refusals_total", {"reason": "full"}) == 1
    tasks += [await gateway.held(gateway.job("urgent")), await gateway.held(gateway.job("fourth", pool="n"))]
    tasks.append(await gateway.held(gateway.job("urgent")))
    with pytest.raises(ApiError) as full:
        await gateway.holds.until_ready(gateway.job("urgent"))
    assert "of yours" in str(full.value.message)
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (gateway.store.pool("m").held.requests, gateway.store.pool("n").held.requests) == (0, 0)


async def test_a_held_request_goes_to_the_address_that_its_replica_has_then() -> None:
    gateway = Held()
    asked = gateway.job()
    task = await gateway.held(asked)
    gateway.has_replica("http://new")
    await asyncio.wait_for(task, 1)
    assert asked.route.served.replicas == {"r0": "http://new"}


@pytest.mark.parametrize(
    ("model", "pool"),
    [
        ({"name": "sim", "aliases": ["chat"]}, "m"),
        ({"name": "chat", "backends": [{"match": {"root": "n"}}]}, "n"),
        ({"name": "chat", "backends": [{"match": {"model": "sim of n"}}]}, "n"),
        ({"name": "chat", "backends": [{"pool": "n"}]}, "n"),
        ({"name": "chat", "backends": [{"match": {"root": "never seen"}}]}, None),
        ({"name": "chat", "backends": [{"match": {"labels": {"version": "v2"}}}]}, None),
    ],
)
def test_a_configured_name_is_known_by_the_names_and_roots_that_it_leads_to(
    model: dict[str, Any], pool: str | None
) -> None:
    """No replica is listed: a gateway that starts while pools are scaled to zero knows only what was served."""
    gateway = Held()
    gateway.fleet.use_models([ModelSettings.model_validate(model)])
    assert [each.pool for each in gateway.fleet.backends("chat")] == ([pool] if pool else [])
