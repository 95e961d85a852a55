"""The choice among a model's backends while the store does not answer."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.engine.facts import ModelCard
from coordinator.errors import StoreLate
from coordinator.registry import ReplicaRecord
from coordinator.store import Store, StoreOptions
from gateway.metrics.gateway_metrics import Metrics
from gateway.replicas.fleet import Fleet
from gateway.request.keyring import Caller
from gateway.routing import weighted
from gateway.routing.holds import Holds
from gateway.routing.router import Router
from gateway.routing.tenants import Tenants
from gateway.routing.weighted import conversation_of
from gateway.settings.gateway_settings import GatewaySettings
from gateway.upstream import Upstream
from tests.gateway.routing.test_router import REPLICAS, job

_SETTINGS = {
    "replicas": [{"id": name, "url": f"http://{name}", "labels": {"of": name}} for name in REPLICAS],
    "models": [{"name": "chat", "backends": [{"name": name, "match": {"labels": {"of": name}}} for name in REPLICAS]}],
}


def test_what_two_tenants_call_alike_are_two_conversations() -> None:
    asked = [
        job(b"the same beginning")._replace(caller=Caller(tenant, True), session=session)
        for session in ("", "the same name")
        for tenant in ("a", "b")
    ]
    assert len(set(map(conversation_of, asked))) == 4


async def test_a_backend_that_becomes_ready_while_the_store_is_late_fails_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, store = GatewaySettings.model_validate(_SETTINGS), Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0")
    fleet = Fleet(settings.replicas, store, Upstream(settings.timeouts.idle_s, None), settings.models)
    tenants, metrics = Tenants(settings), Metrics()
    router = Router(settings, store, metrics, fleet, tenants, Holds(settings.queue, fleet, store, tenants, metrics))
    for name in REPLICAS:
        member = fleet.members[name]
        member.pool, member.alive, member.cards = "m", True, [ModelCard("chat", "m", None, {})]
        store.pool("m").register(ReplicaRecord(name, "1", "ready", 0, 0, member.url))
    fleet.update_served()

    def is_alive(name: str, alive: bool) -> None:
        fleet.members[name].alive = alive
        store.pool("m").register(ReplicaRecord(name, "1", "ready" if alive else "dead", 0, 0, f"http://{name}"))
        router.choice.forget()

    async def late(*_: Any) -> None:
        is_alive("r2", True)
        raise StoreLate("a test")

    monkeypatch.setattr(weighted, "choose_way", late)
    for at in range(20):
        is_alive("r2", False)
        asked = job(f"conversation {at:16}".encode() * 4)
        route, backends = asked.route, fleet.backends("chat")
        route.placed_as, route.offer, route.backends, route.served = "chat", fleet.offers["chat"], backends, backends[0]
        ticket = await router.place(asked, (), list, None, is_new=True)
        assert ticket is not None
        assert ticket.replica in ("r0", "r1")
