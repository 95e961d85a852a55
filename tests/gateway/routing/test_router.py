"""The routing rule without a store: each gateway decides alone."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.breaker import FAILURES
from coordinator.errors import OverBudget
from coordinator.placement import Used
from coordinator.registry import ReplicaRecord
from coordinator.spending import AccountBudget, Spent
from coordinator.store import Store, StoreOptions
from gateway.endpoints import ENDPOINTS
from gateway.errors import ApiError
from gateway.metrics.gateway_metrics import Metrics
from gateway.prompt import Prompt
from gateway.replicas.fleet import Fleet
from gateway.replicas.served import ServedModel
from gateway.request.job import Job
from gateway.request.keyring import Caller
from gateway.request.route import Route
from gateway.routing.holds import Holds
from gateway.routing.router import Router
from gateway.routing.tenants import Tenants
from gateway.routing.ticket import Ticket
from gateway.settings.gateway_settings import GatewaySettings, PolicySettings
from gateway.upstream import Upstream

REPLICAS = ("r0", "r1", "r2")


def lonely_router(**policy: int) -> Router:
    """A router whose store was never connected. Its pool `m` has three replicas."""
    store = Store(StoreOptions("redis://127.0.0.1:1", 0.02), "g0")
    for replica in REPLICAS:
        store.pool("m").register(ReplicaRecord(replica, "1", "ready", 0, 0, f"http://{replica}"))
    settings = GatewaySettings(policy=PolicySettings(**policy))
    fleet = Fleet([], store, Upstream(settings.timeouts.idle_s, None))
    tenants, metrics = Tenants(settings), Metrics()
    return Router(settings, store, metrics, fleet, tenants, Holds(settings.queue, fleet, store, tenants, metrics))


def job(affinity: bytes) -> Job:
    prompt = Prompt("m", ["0" * 32], [400], [0], [], affinity, False)
    served = ServedModel("m", "m", None, {replica: f"http://{replica}" for replica in REPLICAS})
    return Job(
        id="job",
        method="POST",
        path="/v1/completions",
        endpoint=ENDPOINTS["/v1/completions"],
        target="/v1/completions",
        caller=Caller(None, True),
        policy="prefix_kv_aware",
        headers={},
        route=Route(None, (served,), None, served, prompt=prompt, tokens=[100]),
        prompt_tokens=100,
    )


async def place(router: Router, affinity: bytes) -> Ticket:
    ticket = await router.place(job(affinity), (), list, None, is_new=True)
    assert ticket is not None
    assert ticket.why == "fallback"
    return ticket


async def test_a_replica_that_fails_is_avoided_until_it_answers_again() -> None:
    for affinity in (b"a" * 16, b"b" * 16, b"c" * 16):
        router = lonely_router()
        first = await place(router, affinity)
        for _ in range(FAILURES):
            assert (await place(router, affinity)).replica == first.replica
            router.failures.failed(first)
        assert (await place(router, affinity)).replica != first.replica
        router.failures.succeeded(first, is_proof=True)
        assert (await place(router, affinity)).replica == first.replica


async def test_an_answer_that_breaks_off_is_not_one_that_ended_well() -> None:
    router = lonely_router()
    first = await place(router, b"a" * 16)
    for _ in range(FAILURES):
        router.failures.succeeded(first, is_proof=True)
        router.failures.broke_off(first)
    assert (await place(router, b"a" * 16)).replica != first.replica


async def test_no_replica_is_given_more_than_it_may_have() -> None:
    router = lonely_router(max_active_requests=2)
    tickets = [await place(router, b"a" * 16) for _ in range(6)]
    assert sorted(ticket.replica for ticket in tickets) == ["r0", "r0", "r1", "r1", "r2", "r2"]
    assert tickets[0].decision == "fallback; policy=prefix_kv_aware; state=fallback; room=local"
    waiting = asyncio.get_running_loop().create_task(place(router, b"a" * 16))
    await asyncio.sleep(0)
    assert not waiting.done()
    tickets[3].done()
    assert (await waiting).replica == tickets[3].replica


@pytest.mark.parametrize("stays", [True, False])
async def test_the_rest_of_a_stream_keeps_its_backend_while_it_waits_and_replicas_change(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = lonely_router()
    rest = job(b"a" * 16)
    other = ServedModel("other", "other", None, {"r9": "http://r9"})
    route = rest.route
    monkeypatch.setattr(router._fleet, "backends", lambda _: (route.served, other))
    route.stays, route.backends = stays, (route.served,)
    request = router.questions.ask(rest, router.pool(rest), (), "")
    router._asking[request.reservation] = rest
    assert router._serving_now(request) == route.served.shared
    assert [each.backend for each in route.backends] == (["m"] if stays else ["m", "other"])


async def test_replicas_are_avoided_at_the_backend_at_which_a_request_is_aimed(monkeypatch: pytest.MonkeyPatch) -> None:
    router, asked = lonely_router(), job(b"a" * 16)
    other = ServedModel("other", "m", None, {"r1": "http://r1", "r2": "http://r2"})
    asked.route.backends = (asked.route.served, other)
    for replica in other.replicas:
        router._store.pool("other").register(ReplicaRecord(replica, "1", "ready", 0, 0, f"http://{replica}"))
    monkeypatch.setattr(router.choice, "aim", lambda one, *_: one.route.aim(other))
    avoided: list[str] = []

    def avoided_now() -> list[str]:
        avoided.append(asked.route.served.backend)
        return ["r1"]

    ticket = await router.place(asked, (), avoided_now, None, is_new=True)
    assert ticket is not None
    assert (avoided, ticket.replica) == (["other"], "r2")


async def test_where_no_replica_is_well_requests_do_not_wait() -> None:
    router = lonely_router(max_active_requests=1)
    tickets = [await place(router, b"a" * 16) for _ in REPLICAS]
    for ticket in tickets:
        for _ in range(FAILURES):
            router.failures.failed(ticket)
    assert (await place(router, b"a" * 16)).replica == tickets[0].replica


async def test_a_request_reserves_no_more_than_the_longest_context_of_its_model_for_each_choice() -> None:
    router = lonely_router()
    router.questions._tenants = Tenants(GatewaySettings(tenants=[{"name": "t", "limits": {"tokens_per_min": 10}}]))
    asked = job(b"a" * 16)._replace(caller=Caller("t", True), choices=2, max_output_tokens=9000)
    asked.route.served.max_tokens.update(dict.fromkeys(REPLICAS, 1000), r0=4000)
    limits = router.questions.ask(asked, router.pool(asked), (), "").limits
    assert limits is not None
    assert (limits.output_tokens, limits.most_tokens) == (8000 - 100, 8000)


async def test_a_replica_of_which_the_store_knows_nothing_is_no_way_around_budgets() -> None:
    """Its id means another engine there, so nothing is placed on it by the store."""
    router = lonely_router()
    budget = {"per": "day", "tokens": 12_000}
    router.use(GatewaySettings(tenants=[{"name": "t", "budgets": [budget]}]))
    asked = job(b"a" * 16)._replace(caller=Caller("t", True), max_output_tokens=10)
    asked.route.served.unshared.update(dict.fromkeys(REPLICAS, "another life"))
    ticket = await router.place(
        asked, (), list, None, is_new=True
    )  # of a budget that was never seen, this gateway may spend 120
    assert ticket is not None
    with pytest.raises(ApiError) as refused:
        await router.place(asked, (), list, None, is_new=True)
    assert refused.value.code == "budget_reserved"
    ticket.used = Used(20, 20)
    for _ in range(2):
        ticket.done()
    assert ticket.request.bill is not None
    assert router.pool(asked).reservations.spent.unsettled(ticket.request.bill.budgets[0]) == 20


async def test_a_request_that_waited_until_its_budgets_window_was_over_is_told_to_come_again_at_once() -> None:
    router, asked = lonely_router(), job(b"a" * 16)
    asked.route.billed(1000.0)
    request = router.questions.ask(asked, router.pool(asked), (), "")
    budget = AccountBudget("t", "day", "tokens", 100, 0.8, "2026-11-28", 1030, "2026-11-28/tokens/t")
    refusal = OverBudget([(budget, Spent("1", 100, 0), 10)])
    assert router._refused(asked, request, refusal).headers["retry-after"] == "30"
    request.has_waited(40.0)
    assert router._refused(asked, request, refusal).headers["retry-after"] == "1"
